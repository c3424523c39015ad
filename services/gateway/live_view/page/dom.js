// Small helpers around the DOM.

export const $ = (selector) => document.querySelector(selector);

// Makes an element: attributes by name, `class` and `text` included; children are nodes or strings.
export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") node.textContent = value;
    else if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

// Writes only what differs: a page that is open for a day must not keep the browser busy.
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function mark(node, name) {
  if (node.getAttribute("class") !== name) node.setAttribute("class", name);
}

// Parts of a bar, as shares of 1.
export function part(node, share) {
  const percent = `${Math.round(1000 * Math.min(Math.max(share, 0), 1)) / 10}%`;
  if (node.style.getPropertyValue("--part") !== percent) node.style.setProperty("--part", percent);
}
