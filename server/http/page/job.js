// SPDX-License-Identifier: Apache-2.0
// One request: its stream of events, read until the pictures are there, whatever happens to the
// connection. If the connection breaks, the stream goes on after the last event. If the server has
// restarted and forgot the job, the same request with the same seed starts it again.
import {ApiError, events, fromBase64, post, send, toError} from "./api.js";

const kAttempts = 90;  // while they bring nothing new; with the pauses below about four minutes

export function newId() {
  const words = crypto.getRandomValues(new Uint32Array(4));
  return "page-" + [...words].map((word) => word.toString(16).padStart(8, "0")).join("");
}

/** The rule of the C++ and Python clients: the server cannot be reached or leaves, or says when to come back. */
const retryable = (error) => error.status === "UNAVAILABLE" || error.http === 503 ||
  (error.status === "RESOURCE_EXHAUSTED" || error.http === 429) && error.retryAfter !== null;

export const newSeed = () => String(crypto.getRandomValues(new Uint32Array(1))[0]);

const sleep = (seconds) => new Promise((wake) => setTimeout(wake, seconds * 1000));

export class Job {
  /** `params`: GenerationParams in JSON with a seed; `onchange(job)` after each event; `onsignin()`
      resolves when there is another token to try, to false when there is none. */
  constructor(params, {previewEdge = 256, onchange, onsignin}) {
    this.params = {...params, request_id: newId(), disconnect_policy: "DISCONNECT_POLICY_CONTINUE",
      priority: "PRIORITY_INTERACTIVE"};
    this.preview = {every_evaluations: 1, max_edge: previewEdge};
    this.onchange = onchange;
    this.onsignin = onsignin;
    this.state = "sending";  // queued, running, waiting, done, failed, cancelled
    this.images = Array.from({length: params.count || 1}, () => ({evaluation: 0}));
    this.created = performance.now();
    this.effective = null;  // the request with every default filled in
    this.ran = null;  // Run: what the request amounts to. `run` is the method below.
    this.restarts = 0;
    this.begun = false;
    this.reached = {};  // by kind of event and image, how far it was
    this.cancelling = false;
    this.notCancelled = "";  // why the server did not cancel it
    this.stopped = new AbortController();
  }

  get id() { return this.params.request_id; }
  get running() { return ["sending", "queued", "running", "waiting"].includes(this.state); }

  async run() {
    if (!this.running) return;
    this.begun = true;
    this.onchange(this);
    let last = "", known = false;
    for (let attempt = 0; attempt < kAttempts;) {
      let pause = Math.min(0.1 * 2 ** attempt, 3);
      try {
        const accept = {Accept: "text/event-stream"};
        const signal = this.stopped.signal;
        const response = known
          ? await send("GET", `/v1/jobs/${encodeURIComponent(this.id)}/events`,
            {signal, headers: last ? {...accept, "Last-Event-ID": last} : accept})
          : await send("POST", "/v1/generate",
            {signal, headers: accept, body: {params: this.params, preview: this.preview}});
        known = true;
        for await (const event of events(response)) {
          if (event.id) last = event.id;
          if (event.event === "error") throw toError(200, event.data);
          if (this.isNew(event.event, event.data)) attempt = 0;
          this.take(event.event, event.data);
          if (this.state === "done") return;
        }
        throw new ApiError(0, "UNAVAILABLE", "The connection broke.");
      } catch (error) {
        if (this.stopped.signal.aborted) return;
        if (!(error instanceof ApiError)) {
          error = new ApiError(0, "UNAVAILABLE", "The connection broke.");  // in the middle of a read
        }
        if (error.status === "CANCELLED") return this.end("cancelled");
        if (error.status === "UNAUTHENTICATED") {
          if (!await this.onsignin()) return this.end("failed", error);
          ++attempt;
          continue;
        }
        if (error.status === "NOT_FOUND" && known) {
          known = false;  // a server that has restarted
          last = "";
          ++this.restarts;
          pause = 0;
        } else if (!retryable(error)) {
          return this.end("failed", error);
        } else if (error.http === 200) {
          known = false;  // drained: this server ended the job, the next one starts it again
          last = "";
        }
        if (error.retryAfter !== null) pause += Math.min(error.retryAfter, 30);
        this.state = "waiting";
        this.notCancelled = "";
        this.reason = error.message;
        this.onchange(this);
        ++attempt;
        await sleep(pause);
        if (this.stopped.signal.aborted) return;
      }
    }
    this.end("failed", new ApiError(0, "UNAVAILABLE", this.reason));
  }

  /** Whether an event goes further than all before it. A job that is started again repeats the first
      ones; a server that fails it each time must not be asked for ever. */
  isNew(kind, data) {
    const event = data[kind] || {};
    const key = kind + (event.image ? event.image.index : "");
    const far = {queued: -event.position, progress: event.evaluations_done, preview: event.evaluation}[kind] || 0;
    if (this.reached[key] >= far) return false;
    this.reached[key] = far;
    return true;
  }

  take(kind, data) {
    const event = data[kind];
    if (kind === "queued") {
      this.state = "queued";
      this.effective = event.params;
      this.ran = event.run;
      this.queue = {ahead: event.images_ahead, position: event.position,
        start: event.estimated_start_seconds, total: event.estimated_total_seconds,
        at: performance.now()};
    } else if (kind === "started") {
      this.state = "running";
    } else if (kind === "progress") {
      this.state = "running";
      this.progress = {done: event.evaluations_done, of: event.evaluations_total};
    } else if (kind === "preview") {
      this.state = "running";
      const image = this.images[event.image.index];
      if (!image.url) {
        Object.assign(image, {evaluation: event.evaluation, evaluations: event.evaluations,
          preview: event.image.encoded && `data:${event.image.mime_type};base64,${event.image.encoded}`});
      }
    } else if (kind === "image") {
      const {encoded, mime_type: type, seed, class_label: label, width, height, index} = event.image;
      const image = this.images[index];
      if (!image.url && encoded) {  // a job that was started again gives the same bytes
        image.blob = new Blob([fromBase64(encoded)], {type});
        image.url = URL.createObjectURL(image.blob);
        image.preview = undefined;
      }
      Object.assign(image, {seed, label, width, height, type, done: true});
    } else if (kind === "completed") {
      this.state = "done";
      this.effective = event.params;
      this.ran = event.run;
      this.timing = event.timing;
    }
    this.onchange(this);
  }

  end(state, error = null) {
    this.state = state;
    this.error = error;
    this.onchange(this);
  }

  /** Follows it no longer. */
  stop(error = null) {
    this.stopped.abort();
    if (this.running) this.end(error ? "failed" : "cancelled", error);
  }

  /** Ends it on the server before its next evaluation. If the server refuses, the job goes on, and
      `notCancelled` says why. */
  async cancel() {
    if (!this.begun) return this.end("cancelled");
    this.cancelling = true;
    this.notCancelled = "";
    this.onchange(this);
    try {
      await post(`/v1/jobs/${encodeURIComponent(this.id)}/cancel`);
      setTimeout(() => this.stop(), 2000);  // the stream says it, or nobody
    } catch (error) {
      this.cancelling = false;
      if (error.status === "NOT_FOUND") return this.stop();  // the server has no such job
      if (["queued", "running"].includes(this.state)) {
        this.notCancelled = error.message;
        return this.onchange(this);
      }
      // There is no stream that would tell how it ends.
      this.stop(new ApiError(error.http, error.status,
        `The server may still draw this, as it was not told to stop: ${error.message}`));
    }
  }

  /** The page is left: nobody will look at it. */
  leave() {
    if (!this.running || !this.begun) return;
    send("POST", `/v1/jobs/${encodeURIComponent(this.id)}/cancel`, {body: {}, keepalive: true})
      .catch(() => {});
  }

  dispose() {
    for (const image of this.images) if (image.url) URL.revokeObjectURL(image.url);
  }
}
