// SPDX-License-Identifier: Apache-2.0
// The server's own JSON over HTTP: docs/http.md. The token is kept for this tab alone and goes into a
// header, never into an address.

const kSilence = 45000;  // a living stream says something every 15 seconds
const kPatience = 10000;  // with what a living server answers at once

/** A text that the browser keeps under a key of localStorage or sessionStorage. Where it keeps nothing, because site
    data is blocked, the page does. */
export function kept(area, key) {
  const inStorage = (work) => {
    try {
      return work(window[area]);
    } catch {
      return null;
    }
  };
  let value = inStorage((storage) => storage.getItem(key)) || "";
  return {
    get: () => value,
    set: (next) => {
      value = next;
      inStorage((storage) => next ? storage.setItem(key, next) : storage.removeItem(key));
    },
  };
}

export const token = kept("sessionStorage", "denoised-token");

/** What the server refused. `status` is gRPC's name; `http` the status code, 0 if there was no answer;
    `retryAfter` the seconds after which to come back, null if the server did not say. */
export class ApiError extends Error {
  constructor(http, status, message, {violations = [], retryAfter = null} = {}) {
    super(message);
    Object.assign(this, {http, status, violations, retryAfter});
  }
}

/** The error of a reply or of an event. */
export function toError(http, body, retryAfter = null) {
  const error = body && body.error;
  if (!error) return new ApiError(http, "", `The server answered ${http}.`, {retryAfter});
  const details = error.details || [];
  const violations = details.flatMap((detail) => detail.field_violations || []);
  for (const detail of details) {
    if (detail.retry_delay) retryAfter = parseFloat(detail.retry_delay);  // the header has whole seconds
  }
  return new ApiError(http, error.status || "", error.message || "", {violations, retryAfter});
}

/** Sends a request; throws ApiError for everything that is not a reply of success. */
export async function send(method, path, {body, headers = {}, signal, keepalive} = {}) {
  const all = {...headers};
  if (token.get()) all.Authorization = `Bearer ${token.get()}`;
  if (body !== undefined) all["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {method, headers: all, signal, keepalive, credentials: "same-origin",
      body: body === undefined ? undefined : JSON.stringify(body)});
  } catch (error) {
    // Asked of the signal: Chromium before 124 throws an AbortError for all signals.
    if (signal && signal.reason && signal.reason.name === "TimeoutError") {
      throw new ApiError(0, "UNAVAILABLE", "The server does not answer.");
    }
    if (signal && signal.aborted) throw error;
    throw new ApiError(0, "UNAVAILABLE", "The server cannot be reached.");
  }
  if (response.ok) return response;
  const header = parseFloat(response.headers.get("Retry-After"));  // NaN: absent, or a proxy's date
  throw toError(response.status, await response.json().catch(() => null), isNaN(header) ? null : header);
}

/** The body of a reply: "json" or "text". */
export async function read(response, as = "json") {
  try {
    return await response[as]();
  } catch {
    throw new ApiError(0, "UNAVAILABLE", "The connection broke.");
  }
}

/** What takes a server no time: neither drawing nor loading. */
export const get = async (path, as) => read(await send("GET", path, {signal: AbortSignal.timeout(kPatience)}), as);
export const post = async (path, body = {}) =>
  read(await send("POST", path, {body, signal: AbortSignal.timeout(kPatience)}));

/** The events of a response of text/event-stream: {id, event, data}. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "", from = 0;
  try {
    for (;;) {
      const timer = setTimeout(() => reader.cancel().catch(() => {}), kSilence);
      const {value, done} = await reader.read().finally(() => clearTimeout(timer));
      if (done) return;
      text += value.replaceAll("\r", "");
      for (let end; (end = text.indexOf("\n\n", from)) >= 0; text = text.slice(end + 2), from = 0) {
        const event = {id: "", event: "message", data: ""};
        for (const line of text.slice(0, end).split("\n")) {
          const colon = line.indexOf(":");
          if (colon <= 0) continue;  // a comment keeps the connection open
          event[line.slice(0, colon)] = line.slice(colon + 1).replace(/^ /, "");
        }
        if (event.data) yield {...event, data: JSON.parse(event.data)};
      }
      from = Math.max(0, text.length - 1);  // an event may be long: look at no byte twice
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** {name, labels, value} for each sample of Prometheus' text format. */
export function readMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const match = /^([a-z_0-9]+)(?:\{(.*)\})? (\S+)$/i.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value;
    }
    samples.push({name: match[1], labels, value: Number(match[3])});
  }
  return samples;
}

/** Bytes from base64 and back. */
export function fromBase64(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; ++i) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

export async function toBase64(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  let raw = "";
  for (let i = 0; i < bytes.length; i += 32768) {
    raw += String.fromCharCode(...bytes.subarray(i, i + 32768));
  }
  return btoa(raw);
}
