// The conversation and the settings, kept in this browser.

const CONVERSATION = "paceline.conversation";
const SETTINGS = "paceline.settings";

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // written by something else
  }
}

/** The messages kept: {role, content} of a user; an answer also has reasoning, tokens, ended, usage, timing, error. */
export function loadMessages() {
  const messages = read(CONVERSATION, []);
  return Array.isArray(messages) ? messages.filter((each) => typeof each?.content === "string") : [];
}

/** Keep these messages. Where the browser has no room for all, the probabilities of their tokens are given up. */
export function saveMessages(messages) {
  try {
    localStorage.setItem(CONVERSATION, JSON.stringify(messages));
  } catch {
    const bare = messages.map(({ tokens, ...rest }) => rest);
    try {
      localStorage.setItem(CONVERSATION, JSON.stringify(bare));
    } catch {
      localStorage.removeItem(CONVERSATION); // half a conversation would be worse than none
    }
  }
}

/** The settings kept, by field name; numbers as they were typed. */
export function loadSettings() {
  const settings = read(SETTINGS, {});
  return typeof settings === "object" && !Array.isArray(settings) ? settings : {};
}

/** Keep these settings. */
export function saveSettings(settings) {
  localStorage.setItem(SETTINGS, JSON.stringify(settings));
}
