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

const listed = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined);

/** Replaces what is in an element. Lists are flattened; null and undefined are nothing. */
export function put(element, ...children) {
  element.replaceChildren(...listed(children));
  return element;
}

/** As put, but changes only what differs, so that focus, scrolling and a click that is under way are not lost.
    Elements with listeners need a data-key that says what they do: those of other keys are replaced. */
export function update(element, ...children) {
  const before = [...element.childNodes], after = listed(children);
  after.forEach((child, i) => {
    const old = before[i];
    if (!old) {
      element.append(child);
    } else if (typeof child === "string") {
      if (old.nodeType !== Node.TEXT_NODE) old.replaceWith(child);
      else if (old.data !== child) old.data = child;
    } else if (old.tagName !== child.tagName || old.dataset.key !== child.dataset.key) {
      old.replaceWith(child);
    } else if (old !== child) {
      for (const {name} of [...old.attributes]) if (!child.hasAttribute(name)) old.removeAttribute(name);
      for (const {name, value} of child.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
      update(old, [...child.childNodes].map((each) => each.nodeType === Node.TEXT_NODE ? each.data : each));
    }
  });
  for (const old of before.slice(after.length)) old.remove();
}

/** Shows or hides a part of a form. A browser would refuse the whole form for a wrong value that is hidden, and
    could not show where it is. */
export function reveal(element, shown) {
  element.hidden = !shown;
  for (const each of element.querySelectorAll("input, select, textarea")) each.disabled = !shown;
}

export const $ = (id) => document.getElementById(id);

let said = 0;
/** Has a screen reader say it. The same words twice in a row are said twice. */
export function say(text) {
  $("live").textContent = text + (said++ % 2 ? "\u00a0" : "");
}

/** A line at the top of the page, until something else takes its place; "" removes it. */
export function notice(text) {
  if ($("notice").textContent === text) return;  // or a screen reader says it again and again
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
  return n >= 1e4 ? `${Math.round(n / 1e3)} thousand` : String(n);
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
