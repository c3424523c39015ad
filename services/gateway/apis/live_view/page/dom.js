// Helpers for the DOM.

export const $ = (selector) => document.querySelector(selector);

// Creates an element with attributes, of which `text` is its content; children are nodes or strings.
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") node.textContent = value;
    else if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

// Writes only changed texts, to keep the load of a page that stays open low.
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, name) {
  if (node.getAttribute("class") !== name) node.setAttribute("class", name);
}

// Sets the length of a bar segment, as a share of 1.
export function setShare(node, share) {
  const percent = `${Math.round(1000 * Math.min(Math.max(share, 0), 1)) / 10}%`;
  if (node.style.getPropertyValue("--part") !== percent) node.style.setProperty("--part", percent);
}
