// SPDX-License-Identifier: Apache-2.0
// For operators: models, devices, queue and jobs, live.
import {ApiError, get, readMetrics, send} from "./api.js";
import {bytes, confirm, count, duration, h, plain, say, update} from "./dom.js";

const kHistory = 60;

/** The sum of the samples of a name whose labels agree. */
const sum = (samples, name, labels = {}) => samples
  .filter((sample) => sample.name === name && Object.entries(labels).every(([key, value]) => sample.labels[key] === value))
  .reduce((total, sample) => total + sample.value, 0);

/** Shares from 0 to 1, the latest at the right. */
function spark(values, label) {
  const points = values.map((value, i) => `${(i + kHistory - values.length) * 100 / (kHistory - 1)},${29.5 - 28 * value}`);
  const svg = (tag, properties, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  return svg("svg", {viewBox: "0 0 100 31", preserveAspectRatio: "none", class: "spark", role: "img", "aria-label": label},
    svg("polyline", {points: points.join(" "), "vector-effect": "non-scaling-stroke"}));
}

const fact = (name, value, note = "") => h("div", {class: "fact"}, h("dt", {}, name), h("dd", {}, value, note ? h("small", {}, note) : null));

export class Operate {
  /** `onchange()` looks at the server again, since something was changed. */
  constructor(root, {onchange}) {
    this.onchange = onchange;
    this.history = new Map();  // device -> busy shares
    this.boxes = {};
    for (const name of ["server", "queue", "devices", "models", "jobs"]) this.boxes[name] = h("section", {class: `box ${name}`});
    this.problem = h("p", {class: "notice", role: "alert", hidden: true});
    this.loader = this.loadForm();
    root.append(this.problem, ...Object.values(this.boxes));
  }

  /** What the caller may not see is undefined. */
  async optional(path, as) {
    try {
      return await get(path, as);
    } catch (error) {
      if (error instanceof ApiError && ["PERMISSION_DENIED", "UNIMPLEMENTED", "NOT_FOUND"].includes(error.status)) return undefined;
      throw error;
    }
  }

  async refresh(models, server) {
    const [text, jobs] = await Promise.all([this.optional("/metrics", "text"),
      this.optional("/v1/jobs?all_clients=true&page_size=50")]);
    const samples = text === undefined ? null : readMetrics(text);
    this.showServer(server, samples);
    this.showDevices(server, samples);
    this.showQueue(samples);
    this.showModels(models, server, samples);
    this.showJobs(jobs || await this.optional("/v1/jobs"), jobs !== undefined);
    this.before = samples && {samples, at: performance.now()};
  }

  showServer(server, samples) {
    const state = plain(server.state, "SERVER_STATE_");
    const deadline = samples ? sum(samples, "denoised_drain_deadline_time_seconds") : 0;
    const left = deadline - Date.now() / 1000;
    update(this.boxes.server, h("h2", {}, "Server"), h("dl", {class: "row"},
      fact("State", h("span", {class: "pill", "data-state": state}, state),
        deadline > 0 ? (left > 0 ? `must be over in ${duration(left)}` : "its time is over") : `for ${duration(server.uptime_seconds)}`),
      fact("Version", server.version), fact("You are", server.client),
      samples ? fact("Memory", bytes(sum(samples, "process_resident_memory_bytes"))) : null,
      fact("Features", server.features.map((name) => plain(name, "SERVER_FEATURE_")).join(", ") || "–")));
  }

  showDevices(server, samples) {
    const cards = server.devices.map((device) => {
      const at = {device: device.name};
      const rows = [];
      if (device.error) rows.push(h("p", {class: "wrong"}, `Lost: ${device.error}`));
      if (samples) {
        const change = (name) => {
          if (!this.before) return 0;
          const now = sum(samples, name, at), before = sum(this.before.samples, name, at);
          return now < before ? now : now - before;  // a server that has restarted counts anew
        };
        const seconds = this.before ? (performance.now() - this.before.at) / 1000 : 0;
        const evaluations = change("denoised_evaluation_rows_count");
        const busy = seconds ? Math.min(1, change("denoised_evaluation_seconds_sum") / seconds) : 0;
        const past = this.history.get(device.name) || [];
        past.push(busy);
        if (past.length > kHistory) past.shift();
        this.history.set(device.name, past);
        const padding = change("denoised_padding_rows_total"), real = change("denoised_evaluation_rows_sum");
        rows.push(spark(past, `Busy: ${Math.round(100 * busy)} percent`), h("dl", {class: "row"},
          fact("Busy", `${Math.round(100 * busy)} %`),
          fact("Evaluations", seconds ? `${Math.round(evaluations / seconds)} / s` : "–"),
          fact("Rows in each", evaluations ? (real / evaluations).toFixed(1) : "–",
            padding > 0 ? `${Math.round(100 * padding / (padding + real))} % padding` : ""),
          fact("Time of one", evaluations ? duration(change("denoised_evaluation_seconds_sum") / evaluations) : "–"),
          fact("Memory", bytes(sum(samples, "denoised_model_memory_bytes", at)))));
      }
      return h("div", {class: "device"}, h("h3", {}, device.name, h("small", {}, device.description)), rows);
    });
    update(this.boxes.devices, h("h2", {}, "Devices"), samples ? null : h("p", {class: "about"}, "What they do now is for admins."), cards);
  }

  showQueue(samples) {
    if (!samples) return update(this.boxes.queue);
    const waiting = (priority) => `${sum(samples, "denoised_queued_requests", {priority})}`;
    const oldest = Math.max(0, ...samples.filter((sample) => sample.name === "denoised_oldest_wait_seconds").map((sample) => sample.value));
    update(this.boxes.queue, h("h2", {}, "Queue"), h("dl", {class: "row"},
      fact("In flight", String(sum(samples, "denoised_active_images")), `of ${sum(samples, "denoised_slots")} slots`),
      fact("Waiting pictures", String(sum(samples, "denoised_queued_images"))),
      fact("Waiting requests", String(sum(samples, "denoised_queued_requests")),
        ["interactive", "normal", "batch"].map((priority) => `${waiting(priority)} ${priority}`).join(", ")),
      fact("Longest wait", oldest ? duration(oldest) : "–")));
  }

  async change(what, method, path, body) {
    say(`${what}…`);
    this.problem.hidden = true;
    try {
      await send(method, path, body === undefined ? {} : {body});
      say(`${what}: done`);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.problem.textContent = `${what}: ${error.message}`;
      this.problem.hidden = false;
    }
    this.onchange();
  }

  loadForm() {
    const form = h("form", {class: "load", onsubmit: async (event) => {
      event.preventDefault();
      const {name, directory, version, keep, unload} = form.elements;
      const body = {name: name.value.trim()};
      if (directory.value.trim()) body.directory = directory.value.trim();
      if (version.value.trim()) body.version = version.value.trim();
      if (keep.checked) body.keep_current = true;
      if (unload.checked) body.unload_previous = true;
      form.querySelector("button").disabled = true;
      await this.change(`Load ${body.name}`, "POST", "/v1/models", body);
      form.querySelector("button").disabled = false;
    }},
    h("div", {class: "field"}, h("label", {for: "load-name"}, "Model"),
      h("input", {id: "load-name", name: "name", required: true, autocomplete: "off", placeholder: "digits"})),
    h("div", {class: "field wide"}, h("label", {for: "load-directory"}, "Directory on the server"),
      h("input", {id: "load-directory", name: "directory", autocomplete: "off", placeholder: "as the current version"})),
    h("div", {class: "field"}, h("label", {for: "load-version"}, "Version"),
      h("input", {id: "load-version", name: "version", autocomplete: "off", placeholder: "next"})),
    h("label", {class: "check"}, h("input", {type: "checkbox", name: "keep"}), " Do not make it current"),
    h("label", {class: "check"}, h("input", {type: "checkbox", name: "unload"}), " Unload the previous version"),
    h("button", {class: "primary"}, "Load"));
    return h("details", {class: "loader"}, h("summary", {}, "Load a model or a new version"), form);
  }

  showModels(models, server, samples) {
    const admin = server.features.includes("SERVER_FEATURE_MODEL_ADMIN") && samples !== null;
    const rows = models.map((model) => {
      const full = `${model.name}@${model.version}`, state = plain(model.state, "MODEL_STATE_");
      const act = (key, text, action, kind = "") => h("button", {type: "button", class: kind, "data-key": `${key} ${full}`, onclick: action}, text);
      return h("tr", {}, h("th", {scope: "row"}, model.name, h("small", {}, `@${model.version}`)),
        h("td", {}, h("span", {class: "pill", "data-state": state}, state), model.current ? h("span", {class: "pill"}, "current") : null,
          model.error ? h("p", {class: "wrong"}, model.error) : null),
        h("td", {}, model.aliases.join(", ") || "–"), h("td", {}, model.pipeline || model.architecture),
        h("td", {class: "number"}, bytes(model.memory_bytes)),
        admin ? h("td", {}, h("div", {class: "buttons"},
          act("reload", "Reload", async () => await confirm(`Reload ${model.name}?`,
            "Its directory is read again as a new version, which becomes current. The version before is unloaded when its requests are done.", "Reload") &&
            this.change(`Reload ${model.name}`, "POST", "/v1/models", {name: model.name, unload_previous: true})),
          model.current ? null : act("current", "Make current", () =>
            this.change(`${full} current`, "PUT", `/v1/aliases/${encodeURIComponent(model.name)}`, {target: full})),
          act("unload", "Unload", async () => await confirm(`Unload ${full}?`,
            "Requests that it has are finished first. New ones are refused.", "Unload") &&
            this.change(`Unload ${full}`, "DELETE", `/v1/models/${encodeURIComponent(full)}`), "danger"))) : null);
    });
    update(this.boxes.models, h("h2", {}, "Models"), h("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Models"}, h("table", {},
      h("thead", {}, h("tr", {}, ["Model", "State", "Aliases", "Kind", "Memory", ...(admin ? ["Change"] : [])].map((name) => h("th", {scope: "col"}, name)))),
      h("tbody", {}, rows))), admin ? this.loader : null);
  }

  showJobs(list, all) {
    if (!list) return update(this.boxes.jobs);
    const rows = list.jobs.map((job) => {
      const state = plain(job.state, "JOB_STATE_"), ended = job.end_time ? new Date(job.end_time) : new Date();
      const live = ["queued", "running"].includes(state);
      const {evaluations_done: done = 0, evaluations_total: of = 0} = job.progress || {};
      return h("tr", {}, h("th", {scope: "row", class: "id", title: job.request_id}, job.request_id.slice(0, 14)), h("td", {}, job.client),
        h("td", {}, job.params.model), h("td", {}, h("span", {class: "pill", "data-state": state}, state),
          job.error && job.error.message && state === "failed" ? h("p", {class: "wrong"}, job.error.message) : null),
        h("td", {}, live ? h("progress", {max: of || 1, value: done, "aria-label": "Progress"}) : count(job.images_done, "picture")),
        h("td", {class: "number"}, duration((ended - new Date(job.create_time)) / 1000)),
        h("td", {}, live ? h("button", {type: "button", "data-key": `cancel ${job.request_id}`, onclick: () =>
          this.change("Cancel", "POST", `/v1/jobs/${encodeURIComponent(job.request_id)}/cancel`, {})}, "Cancel") : null));
    });
    update(this.boxes.jobs, h("h2", {}, "Jobs"), rows.length
      ? h("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Jobs"}, h("table", {},
        h("thead", {}, h("tr", {}, ["Job", "Client", "Model", "State", "Done", "Took", ""].map((name) => h("th", {scope: "col"}, name)))),
        h("tbody", {}, rows))) : h("p", {class: "about"}, all ? "None that run or are kept." : "None of yours."));
  }
}
