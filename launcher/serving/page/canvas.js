// Drawing surfaces that are sharp on any screen and wear the page's colours.

/** A drawing context over a canvas of this height, in CSS pixels, cleared; its width is that of its place. */
export function begin(canvas, height) {
  const scale = devicePixelRatio || 1;
  const width = Math.max(1, Math.floor(canvas.parentElement.clientWidth - padding(canvas.parentElement)));
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

function padding(element) {
  const style = getComputedStyle(element);
  return parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
}

/** The page's colour of this name, such as "used". */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** The next of 1, 2, 5, 10, … that is not below a value: where an axis ends. */
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}
