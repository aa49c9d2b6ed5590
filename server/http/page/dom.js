// SPDX-License-Identifier: Apache-2.0
// Elements and words. Text is always set as text, so nothing that a server or a model says can be markup.

/** An element: h("button", {class: "primary", onclick: f, "aria-label": "…"}, "Draw"). */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  return put(element, ...children);
}

/** Replaces what is in an element. Lists are flattened; null and undefined are nothing. */
export function put(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export const $ = (id) => document.getElementById(id);

let said = 0;
/** Has a screen reader say it. The same words twice in a row are said twice. */
export function say(text) {
  $("live").textContent = text + (said++ % 2 ? "\u00a0" : "");
}

/** A line at the top of the page, until something else takes its place; "" removes it. */
export function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

/** "SAMPLER_EULER_ANCESTRAL", "SAMPLER_" -> "euler ancestral" */
export const plain = (name, prefix = "") =>
  (name || "").replace(prefix, "").toLowerCase().replaceAll("_", " ");

export const count = (n, one, many = one + "s") => `${n} ${n === 1 ? one : many}`;

/** A message of the server as a sentence. */
export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?…]$/.test(text) ? "" : ".");

export function duration(seconds) {
  if (!(seconds >= 0)) return "–";
  if (seconds < 0.0995) return `${(seconds * 1000).toPrecision(2)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (n = Number(n); n >= 1000 && unit + 1 < units.length; ++unit) n /= 1024;
  return `${n < 10 && unit ? n.toFixed(1) : Math.round(n)} ${units[unit]}`;
}

export function quantity(n) {
  n = Number(n);
  if (n >= 1e9) return `${(n / 1e9).toFixed(1)} billion`;
  if (n >= 1e6) return `${(n / 1e6).toFixed(1)} million`;
  return String(n);
}

/** Asks before something that cannot be undone. */
export function confirm(title, text, verb) {
  const dialog = $("confirm");
  put(dialog, h("form", {method: "dialog"},
    h("h2", {id: "confirm-title"}, title), h("p", {}, text),
    h("div", {class: "buttons"}, h("span"), h("button", {value: "no"}, "Cancel"),
      h("button", {value: "yes", class: "danger"}, verb))));
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), {once: true});
  });
}
