// The page: its two views, the key, and what is served.

import { Chat } from "./chat.js";
import { byId, show } from "./dom.js";
import { EngineView } from "./engine.js";
import { apiKey, getJson } from "./server.js";

const RETRY_MS = 2000;
const TABS = ["chat", "engine"];

const chat = new Chat(askForKey);
const engine = new EngineView(askForKey);

function selectTab(name) {
  for (const each of TABS) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
    show(byId(each), each === name);
  }
  document.body.dataset.view = name;
  engine.watch(name === "engine");
}

for (const name of TABS) {
  byId(`tab-${name}`).addEventListener("click", () => {
    history.replaceState(null, "", name === "chat" ? "." : "#engine");
    selectTab(name);
  });
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = TABS[1 - TABS.indexOf(name)];
    byId(`tab-${other}`).focus();
    byId(`tab-${other}`).click();
  });
}

/** Ask the person for a key; reason: what the server said of the one before. */
function askForKey(reason) {
  if (reason && apiKey.get()) byId("key-reason").textContent = `The server says: ${reason}.`;
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key-form").addEventListener("submit", () => {
  apiKey.set(byId("key").value.trim());
  byId("key").value = "";
  learnModel();
});

/** Find out what is served; while the server cannot say, try again. */
async function learnModel() {
  try {
    const { data } = await getJson("v1/models");
    chat.model = data[0].id;
    byId("model").textContent = data[0].id;
    byId("welcome-model").textContent = data[0].id;
    document.title = `${data[0].id} · paceline`;
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
    else setTimeout(learnModel, RETRY_MS);
  }
}

selectTab(location.hash === "#engine" ? "engine" : "chat");
learnModel();
