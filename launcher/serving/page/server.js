// Requests to the server that this page came from, and its server-sent events.

const KEY = "paceline.key";

/** What the server, or the way to it, has to say of a request that was not served. */
export class ServerError extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** The API key, kept until the tab is closed. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => sessionStorage.setItem(KEY, key),
};

async function request(path, options) {
  const headers = { ...options.headers };
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (!answer.ok) throw await errorOf(answer);
  return answer;
}

async function errorOf(answer) {
  try {
    const { error } = await answer.json();
    return new ServerError(error.message, answer.status, error.param);
  } catch {
    return new ServerError(`The server answered with status ${answer.status}.`, answer.status);
  }
}

/** GET a JSON document. Throws ServerError. */
export async function getJson(path, signal) {
  const answer = await request(path, { signal });
  return answer.json();
}

/** POST a body and give the stream's objects one by one, until its end. Throws ServerError, or AbortError. */
export async function* events(path, body, signal) {
  const answer = await request(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of eventData(answer.body, signal)) {
    if (data === "[DONE]") return;
    const content = JSON.parse(data);
    if (content.error) throw new ServerError(content.error.message, 0, content.error.param);
    yield content;
  }
  throw new ServerError("The connection ended before the answer did.");
}

async function* eventData(stream, signal) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + decoder.decode(value, { stream: true })).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } catch (error) {
    if (signal.aborted || error.name === "AbortError") throw error;
    throw new ServerError("The connection broke before the answer ended.");
  } finally {
    reader.cancel().catch(() => undefined); // closed already, or broken: either way nothing more is read
  }
}
