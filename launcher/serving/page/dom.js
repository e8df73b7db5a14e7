// Elements are made here and nowhere by parsing text, so what a model writes can never become markup.

/** An element with these properties (class, text, listeners as onclick, attributes as given) and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** The element of this id, which the page has. */
export function byId(id) {
  return document.getElementById(id);
}

/** Show or hide an element. */
export function show(element, visible) {
  element.hidden = !visible;
}

/** Put a text into the clipboard and say so on the button; where the browser forbids it (plain HTTP), say that. */
export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here";
  }
  setTimeout(() => (button.textContent = before), 1500);
}
