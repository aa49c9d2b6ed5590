// SPDX-License-Identifier: Apache-2.0
// What to draw. Everything here follows from the model as the server describes it.
import {fromBase64, toBase64} from "./api.js";
import {$, count, h, plain, put, quantity, reveal, say, update} from "./dom.js";
import {newSeed} from "./job.js";
import {paintMask} from "./mask.js";

const kManyClasses = 40;  // more are chosen by typing
const kNoisy = {eta: ["SAMPLER_DDIM", "SAMPLER_TCD"],
  s_churn: ["SAMPLER_EULER", "SAMPLER_HEUN", "SAMPLER_EDM_EULER"],
  solver_order: ["SAMPLER_DEIS", "SAMPLER_UNI_PC", "SAMPLER_DPM_SOLVER", "SAMPLER_DPM_SOLVER_SDE",
    "SAMPLER_EDM_DPM_SOLVER", "SAMPLER_DPM_SOLVER_SINGLESTEP"]};

/** A labelled control. `field` is its name in GenerationParams, which errors speak of. */
function field(name, label, control, hint = "") {
  const id = control.id || (control.id = `field-${name.replaceAll(".", "-")}`);
  const described = hint ? h("small", {id: `${id}-hint`}, hint) : null;
  if (hint) control.setAttribute("aria-describedby", `${id}-hint`);
  return h("div", {class: "field", "data-field": name}, h("label", {for: id}, label), control, described,
    h("p", {class: "wrong", hidden: true}));
}

function number(name, label, {min, max, step = 1, placeholder = "", hint, inputmode} = {}) {
  return field(name, label, h("input", {type: "number", name, min, max, step, placeholder, inputmode}), hint);
}

function choice(name, label, options, hint) {
  return field(name, label, h("select", {name},
    options.map(([value, text]) => h("option", {value}, text))), hint);
}

/** A text at its commas, without what is empty. */
const partsOf = (text) => text.split(",").map((part) => part.trim()).filter(Boolean);

/**
 * The classes that a text names with commas between them: numbers where the model has such a label, else the words.
 * A label may have commas itself, such as "tench, Tinca tinca": the longest that fits is one label.
 */
export function classesOf(text, labels) {
  const classes = new Map(), nameOf = (parts) => parts.join(", ").toLowerCase();
  let longest = 1;
  for (const [i, label] of labels.entries()) {
    const parts = partsOf(label);
    longest = Math.max(longest, parts.length);
    if (!classes.has(nameOf(parts))) classes.set(nameOf(parts), i);
  }
  const named = [];
  for (let rest = partsOf(text); rest.length;) {
    let size = Math.min(longest, rest.length);
    while (size > 1 && !classes.has(nameOf(rest.slice(0, size)))) --size;
    named.push(classes.get(nameOf(rest.slice(0, size))) ?? rest[0]);
    rest = rest.slice(size);
  }
  return named;
}

export class Form {
  /** `blobOf(url)`: the picture of a result that is dropped here. */
  constructor(root, {ondraw, blobOf}) {
    Object.assign(this, {root, ondraw, blobOf});
    this.models = [];
    this.start = null;  // {blob, url, width, height}
    this.mask = null;   // {blob, url}
    this.model = null;
    root.addEventListener("submit", (event) => {
      event.preventDefault();
      this.draw();
    });
    root.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        root.requestSubmit();
      }
    });
    // A browser says what is wrong with a field only where the field can be seen.
    root.addEventListener("invalid", (event) => this.unfold(event.target), true);
    document.addEventListener("paste", (event) => {
      const file = [...event.clipboardData.files].find((each) => each.type.startsWith("image/"));
      if (file && this.model && !$("draw").hidden) this.setStart(file);
    });
  }

  setModels(models) {
    this.models = models.filter((model) => model.state === "MODEL_STATE_AVAILABLE");
    const chosen = this.model && this.models.find((model) => this.nameOf(model) === this.nameOf(this.model));
    const described = (model) => JSON.stringify([model.pipeline, model.architecture, model.parameters, model.labels,
      model.capabilities, model.defaults, model.limits, model.samplers, model.noise_schedules]);
    if (!chosen || described(chosen) !== described(this.model)) {
      const next = chosen || this.models.find((model) => model.current) || this.models[0] || null;
      if (next || this.model || !this.root.firstChild) this.show(next);
      return;
    }
    // Somebody may be writing in a field: only the list of models changes.
    this.model = chosen;
    update(this.root.elements.model, this.options());
    this.root.elements.model.value = this.nameOf(chosen);
  }

  options() {
    return this.models.map((model) => h("option", {value: this.nameOf(model), "data-key": this.nameOf(model)},
      this.nameOf(model)));
  }

  nameOf(model) { return model.current ? model.name : `${model.name}@${model.version}`; }

  show(model) {
    const kept = this.model ? this.values() : {};
    this.model = model;
    if (!model) {
      put(this.root, h("p", {class: "none"}, "No model is ready. Operate shows what the server does."));
      return;
    }
    const {capabilities: can, limits, defaults} = model;
    const select = field("model", "Model", h("select", {name: "model"}, this.options()));
    select.querySelector("select").addEventListener("change", (event) => {
      this.show(this.models.find((each) => this.nameOf(each) === event.target.value));
      say(`Model ${event.target.value}`);
      this.root.elements.model.focus();
    });
    const size = this.size();
    const more = [
      h("div", {class: "pair"},
        number("steps", "Steps", {min: 1, max: limits.max_steps, placeholder: defaults.steps}),
        can.guidance ? number("guidance_scale", "Guidance",
          {min: 0, max: 100, step: "any", placeholder: defaults.guidance_scale}) : null),
      choice("sampler", "Sampler", [["", `${plain(defaults.sampler, "SAMPLER_")} (default)`],
        ...model.samplers.filter((name) => name !== defaults.sampler)
          .map((name) => [name, plain(name, "SAMPLER_")])]),
      choice("noise_schedule", "Noise levels", [
        ["", `${plain(defaults.noise_schedule, "NOISE_SCHEDULE_")} (default)`],
        ...model.noise_schedules.filter((name) => name !== defaults.noise_schedule)
          .map((name) => [name, plain(name, "NOISE_SCHEDULE_")])]),
      h("div", {class: "pair extra"},
        number("eta", "Noise (eta)", {min: 0, max: 1, step: "any", placeholder: "default"}),
        number("s_churn", "Churn", {min: 0, step: "any", placeholder: 0}),
        number("solver_order", "Order", {min: 1, max: 3, placeholder: "default"})),
      can.image_guidance ? number("image_guidance_scale", "Guidance by the start",
        {min: 1, max: 100, step: "any", placeholder: defaults.image_guidance_scale}) : null,
      can.guidance_rescale ? number("guidance_rescale", "Rescaled guidance",
        {min: 0, max: 1, step: "any", placeholder: 0}) : null,
      can.guidance_interval ? h("div", {class: "pair"},
        number("guidance_start", "Guidance from", {min: 0, max: 1, step: "any", placeholder: 0}),
        number("guidance_stop", "to, of all steps", {min: 0, max: 1, step: "any", placeholder: 1})) : null,
      limits.max_clip_skip > 0 ? number("text_options.clip_skip", "Clip skip",
        {min: 0, max: limits.max_clip_skip, placeholder: 0}) : null,
      can.second_text ? field("conditions.text_2", "Prompt for the second encoder",
        h("textarea", {name: "text_2", rows: 2})) : null,
      h("div", {class: "pair"},
        field("seed", "Seed", h("input", {name: "seed", inputmode: "numeric", pattern: "[0-9]*",
          placeholder: "random", autocomplete: "off"})),
        choice("output.format", "Format", [["IMAGE_FORMAT_PNG", "PNG"], ["IMAGE_FORMAT_JPEG", "JPEG"],
          ["IMAGE_FORMAT_WEBP", "WebP"]])),
      limits.latent_factor > 1 ? null : size,
    ];
    put(this.root, select,
      h("p", {class: "about parts"}, [model.pipeline || model.architecture,
        `${quantity(model.parameters)} parameters`, `${defaults.width} × ${defaults.height}`].map((each) => h("span", {}, each))),
      this.condition(),
      can.text && can.guidance ? h("details", {},
        h("summary", {}, "Negative prompt"),
        field("conditions.negative_text", "What the pictures do not show",
          h("textarea", {name: "negative", rows: 2}))) : null,
      h("div", {class: "pair"},
        number("count", "Pictures", {min: 1, max: limits.max_count, placeholder: 1}),
        limits.latent_factor > 1 ? size : null),
      this.startField(),
      h("details", {id: "more"}, h("summary", {}, "More settings"),
        h("div", {class: "folded"}, more)),
      h("div", {class: "draw"}, h("button", {class: "primary", type: "submit", title: "Ctrl+Enter"}, "Draw"),
        h("p", {class: "wrong", id: "form-wrong", role: "alert", hidden: true})));
    this.root.elements.sampler.addEventListener("change", (event) => {
      const chosen = event.target.value || defaults.sampler;
      // The limit of another sampler is known to the server alone.
      this.root.elements.steps.max = chosen === defaults.sampler ? limits.max_steps : "";
      for (const [name, samplers] of Object.entries(kNoisy)) {
        reveal(this.root.querySelector(`[data-field="${name}"]`), samplers.includes(chosen));
      }
    });
    this.root.elements.count.value = 4 <= limits.max_count ? 4 : 1;
    this.restore({...kept, model: this.nameOf(model)});
  }

  condition() {
    const {model} = this, can = model.capabilities;
    if (can.text) {
      return field("conditions", "Prompt", h("textarea", {name: "prompt", rows: 3, required: true,
        placeholder: "What the pictures show", maxlength: 20000}));
    }
    if (can.class_label) {
      const labels = Array.from({length: model.limits.num_classes}, (_, i) => model.labels[i] || String(i));
      if (labels.length <= kManyClasses) {
        return h("fieldset", {class: "field", "data-field": "conditions"},
          h("legend", {}, "Classes"),
          h("div", {class: "chips"}, labels.map((name, i) => h("label", {class: "chip"},
            h("input", {type: "checkbox", name: "label", value: String(i)}), h("span", {}, name)))),
          h("small", {}, "Several take turns. None: a random one for each picture."),
          h("p", {class: "wrong", hidden: true}));
      }
      const list = h("datalist", {id: "classes"}, labels.map((name) => h("option", {value: name})));
      return h("div", {}, field("conditions", "Classes", h("input", {name: "labels", list: "classes",
        autocomplete: "off", placeholder: "random"}),
      `Names or numbers from 0 to ${labels.length - 1}, with commas between them. Several take turns.`), list);
    }
    if (can.class_vector) {
      const size = model.limits.class_vector_size || 1;
      return field("conditions", "Condition", h("input", {name: "vectors", required: true,
        autocomplete: "off"}), `${count(size, "number")}, with commas between them`);
    }
    return h("p", {class: "about"}, "This model draws without being told what.");
  }

  /** As many pixels as the model's own size, in these proportions. */
  fit(width, height) {
    const {limits, defaults} = this.model, multiple = limits.size_multiple || 1;
    const scale = Math.sqrt(defaults.width * defaults.height / (width * height));
    return [width, height].map((n) => Math.min(limits.max_edge || Infinity,
      Math.max(multiple, Math.round(n * scale / multiple) * multiple)));
  }

  /** The size that was typed. A side that was not follows the start picture, or is the model's. */
  ownSize({width, height}) {
    const {limits, defaults} = this.model, multiple = limits.size_multiple || 1;
    const picture = this.mask ? null : this.start;
    if (picture && !width && !height) return {};
    const scale = picture && (width / picture.width || height / picture.height);
    const side = (typed, name) => Number(typed) || (picture
      ? Math.max(multiple, Math.floor(picture[name] * scale / multiple) * multiple) : defaults[name]);
    return {width: side(width, "width"), height: side(height, "height")};
  }

  /** What a request without a size draws. */
  unsetSize() {
    const {width, height} = this.model.defaults;
    return this.start && !this.mask ? "as the picture" : `${width} × ${height}`;
  }

  size() {
    const {limits, defaults} = this.model;
    const multiple = limits.size_multiple || 1;
    const known = new Map([[`${defaults.width}x${defaults.height}`, ""]]);
    for (const [name, ...ratio] of [["portrait", 2, 3], ["landscape", 3, 2], ["wide", 16, 9], ["square", 1, 1]]) {
      const value = this.fit(...ratio).join("x");
      if (!known.has(value)) known.set(value, name);
    }
    const select = choice("size", "Size", [...[...known].map(([value, name], i) => [i ? value : "",
      i ? `${value.replace("x", " × ")} ${name}` : this.unsetSize()]), ["own", "other…"]]);
    const own = h("div", {class: "pair"},
      number("width", "Width", {min: multiple, max: limits.max_edge, step: multiple, placeholder: defaults.width}),
      number("height", "Height", {min: multiple, max: limits.max_edge, step: multiple,
        placeholder: defaults.height}));
    select.querySelector("select").addEventListener("change", (event) => {
      reveal(own, event.target.value === "own");
    });
    return h("div", {class: "size"}, select, own);
  }

  startField() {
    this.startBox = h("div", {class: "field start", "data-field": "init_image"});
    const over = (on) => (event) => {
      event.preventDefault();
      this.startBox.classList.toggle("over", on);
    };
    this.startBox.addEventListener("dragover", over(true));
    this.startBox.addEventListener("dragleave", over(false));
    this.startBox.addEventListener("drop", (event) => {
      over(false)(event);
      const file = [...event.dataTransfer.files].find((each) => each.type.startsWith("image/"));
      if (file) return this.setStart(file);
      const url = event.dataTransfer.getData("text/x-denoised");
      const blob = url && this.blobOf(url);
      if (blob) this.setStart(blob);
    });
    this.showStart();
    return this.startBox;
  }

  showStart() {
    if (!this.startBox || !this.model) return;
    const {capabilities: can, defaults} = this.model;
    const {size, width, height} = this.root.elements;
    if (size) {
      size.options[0].textContent = this.unsetSize();
      for (const side of [width, height])
        side.placeholder = this.start && !this.mask ? "as the picture" : defaults[side.name];
    }
    const file = h("input", {type: "file", accept: "image/png,image/jpeg,image/webp", id: "start-file",
      class: "hidden", onchange: (event) => event.target.files[0] && this.setStart(event.target.files[0])});
    if (!this.start) {
      put(this.startBox, file, h("label", {for: "start-file", class: "drop"},
        h("strong", {}, can.init_image_required ? "A picture to start from (needed)" : "Start from a picture"),
        h("small", {}, "Drop a file or a result here, paste one, or choose")),
      h("p", {class: "wrong", hidden: true}));
      return;
    }
    const value = this.strength || (this.mask && !can.mask_required ? 1 : defaults.strength || 0.6);
    const shown = h("output", {for: "strength"}, value.toFixed(2));
    const strength = !can.strength ? null : h("div", {class: "field", "data-field": "init_image.strength"},
      h("label", {for: "strength", title: "How much of the picture is drawn anew: 1 is all of it"}, "Strength ", shown),
      h("input", {type: "range", id: "strength", name: "strength", min: 0.05, max: 1, step: 0.05, value,
        oninput: (event) => {
          this.strength = Number(event.target.value);
          shown.textContent = this.strength.toFixed(2);
        }}));
    const paint = can.mask ? h("button", {type: "button", onclick: () => this.paint()},
      this.mask ? "Change the mask" : can.mask_required ? "Paint a mask (needed)" : "Paint a mask") : null;
    put(this.startBox, h("div", {class: "started"},
        h("div", {class: "thumb"}, h("img", {src: this.start.url, alt: "The picture to start from"}),
          this.veil()),
        h("div", {}, h("strong", {}, this.mask ? "Draws the painted part anew" : "Starts from this picture"),
          strength,
          h("div", {class: "buttons"}, paint,
            this.mask ? h("button", {type: "button", onclick: () => this.setMask(null)}, "No mask") : null,
            h("button", {type: "button", onclick: () => this.setStart(null)}, "Remove")))),
      h("p", {class: "wrong", hidden: true}));
  }

  /** Tints what the mask has white, whatever the picture's colours. */
  veil() {
    if (!this.mask) return null;
    const veil = h("div", {class: "veil", role: "img", "aria-label": "The mask"});
    veil.style.maskImage = `url(${this.mask.url})`;
    return veil;
  }

  async setStart(blob) {
    if (!this.model) return;
    const {limits} = this.model;
    const before = this.start;
    this.latest = blob;
    this.start = null;
    this.setMask(null);  // shows neither any more
    if (before) URL.revokeObjectURL(before.url);
    if (blob) {
      const url = URL.createObjectURL(blob);
      const picture = new Image();
      picture.src = url;
      try {
        await picture.decode();
      } catch {
        URL.revokeObjectURL(url);
        this.showStart();
        return this.wrong([{field: "init_image", description: "is no picture that this browser can read"}]);
      }
      // A request has a limit. What is larger than needed is scaled down here, not there.
      const start = {blob, url, width: picture.naturalWidth, height: picture.naturalHeight};
      const most = Number(limits.max_request_bytes || 0) * 0.6;
      if (most && blob.size > most) {
        const scale = Math.min(1, 1024 / Math.max(start.width, start.height));
        const canvas = h("canvas", {width: Math.round(start.width * scale),
          height: Math.round(start.height * scale)});
        canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
        Object.assign(start, {blob: await new Promise((done) => canvas.toBlob(done, "image/png")),
          width: canvas.width, height: canvas.height});
      }
      if (this.latest !== blob) return URL.revokeObjectURL(url);  // another one was set meanwhile
      this.start = start;
      say("Start picture set");
    }
    this.showStart();
  }

  setMask(blob) {
    const before = this.mask;
    this.mask = blob && {blob, url: URL.createObjectURL(blob)};
    this.showStart();
    if (before) URL.revokeObjectURL(before.url);
  }

  async paint() {
    const blob = await paintMask(this.start, this.mask);
    if (blob !== undefined) this.setMask(blob);
  }

  values() {
    const values = {};
    for (const element of this.root.elements) {
      if (!element.name || element.type === "file") continue;
      if (element.type === "checkbox") (values[element.name] ||= []).push(...(element.checked ? [element.value] : []));
      else values[element.name] = element.value;
    }
    return values;
  }

  restore(values) {
    for (const element of this.root.elements) {
      if (!(element.name in values)) continue;
      const value = values[element.name];
      if (element.type === "checkbox") {
        element.checked = value.includes(element.value);
      } else if (element.tagName !== "SELECT" || [...element.options].some((option) => option.value === value)) {
        if (value !== "" || element.name !== "count") element.value = value;
      }
    }
    for (const name of ["size", "sampler"]) {  // which say what else is shown
      this.root.elements[name].dispatchEvent(new Event("change"));
    }
  }

  /** The request as GenerationParams in JSON; every one has a seed, so that it can be repeated. */
  async params() {
    const values = this.values(), {model} = this;
    const params = {model: this.nameOf(model), seed: (values.seed || "").trim() || newSeed(),
      count: Number(values.count) || 1};
    const numeric = (name) => values[name] !== undefined && values[name] !== "" &&
      !this.root.elements[name].disabled && (params[name] = Number(values[name]));
    for (const name of ["steps", "guidance_scale", "eta", "s_churn", "solver_order", "image_guidance_scale",
      "guidance_rescale", "guidance_start", "guidance_stop"]) numeric(name);
    if (values.sampler) params.sampler = values.sampler;
    if (values.noise_schedule) params.noise_schedule = values.noise_schedule;
    if (values["output.format"] !== "IMAGE_FORMAT_PNG") params.output = {format: values["output.format"]};
    if (values.size === "own") {
      Object.assign(params, this.ownSize(values));
    } else if (values.size) {
      [params.width, params.height] = values.size.split("x").map(Number);
    }
    if (values.prompt !== undefined) {
      const condition = {text: values.prompt};
      if (values.negative) condition.negative_text = values.negative;
      if (values.text_2) condition.text_2 = values.text_2;
      params.conditions = [condition];
      const skip = values["text_options.clip_skip"];
      if (skip) params.text_options = {clip_skip: Number(skip)};
    }
    const labels = values.label || classesOf(values.labels || "", model.labels);
    if (labels.length) {
      const numbers = labels.map(Number);
      if (numbers.some(Number.isNaN)) {
        throw [{field: "conditions", description: "names a class that the model does not have"}];
      }
      params.conditions = Array.from({length: numbers.length === 1 ? 1 : params.count},
        (_, i) => ({class_label: numbers[i % numbers.length]}));
    }
    if (values.vectors) {
      const numbers = values.vectors.split(/[\s,]+/).map(Number), size = model.limits.class_vector_size || 1;
      params.conditions = Array.from({length: Math.ceil(numbers.length / size)},
        (_, i) => ({class_vector: numbers.slice(i * size, (i + 1) * size)}));
    }
    if (this.start) {
      params.init_image = {encoded: await toBase64(this.start.blob)};
      if (values.strength && model.capabilities.strength) params.init_image.strength = Number(values.strength);
      if (this.mask && model.capabilities.mask) params.mask = {encoded: await toBase64(this.mask.blob)};
    }
    return params;
  }

  async draw() {
    if (!this.model) return;
    this.wrong([]);
    try {
      this.ondraw(await this.params());
    } catch (violations) {
      if (!Array.isArray(violations)) throw violations;
      this.wrong(violations);
    }
  }

  /** Puts a request back into the fields, with its start picture and mask. */
  async fill(params) {
    const model = this.models.find((each) => this.nameOf(each) === params.model);
    if (model && model !== this.model) this.show(model);
    if (!this.model) return;  // the form says so
    const conditions = params.conditions || [], [first = {}] = conditions;
    const labels = first.class_label === undefined ? [] : conditions.map((each) => String(each.class_label));
    const values = {seed: params.seed, count: String(params.count || 1), sampler: params.sampler || "",
      noise_schedule: params.noise_schedule || "", prompt: first.text ?? "",
      negative: first.negative_text || "", text_2: first.text_2 || "",
      "text_options.clip_skip": params.text_options?.clip_skip || "",
      label: labels, labels: labels.join(","),
      vectors: first.class_vector?.length ? conditions.flatMap((each) => each.class_vector).join(", ") : "",
      width: params.width || "", height: params.height || "",
      size: params.width ? "own" : "",
      "output.format": (params.output && params.output.format) || "IMAGE_FORMAT_PNG"};
    for (const name of ["steps", "guidance_scale", "eta", "s_churn", "solver_order", "image_guidance_scale",
      "guidance_rescale", "guidance_start", "guidance_stop"]) values[name] = params[name] ?? "";
    this.restore(values);
    $("more").open = true;
    this.root.scrollIntoView();
    (this.root.elements.prompt || this.root.elements.count).focus();
    const picture = (image) => image ? new Blob([fromBase64(image.encoded)]) : null;
    const start = picture(params.init_image);
    await this.setStart(start);
    if (this.latest !== start) return;
    this.strength = params.init_image && params.init_image.strength;
    this.setMask(picture(params.mask));
  }

  /** Opens what an element is folded away in. */
  unfold(element) {
    const folded = element.closest("details");
    if (folded) folded.open = true;
  }

  /** Shows the server's violations at their fields; what has no field here, below the button. */
  wrong(violations) {
    for (const element of this.root.querySelectorAll(".wrong")) element.hidden = true;
    for (const element of this.root.querySelectorAll("[aria-invalid]")) element.removeAttribute("aria-invalid");
    const others = [];
    let first = null;
    for (const {field: name, description} of violations) {
      const path = name.replace(/^params\./, "").replace(/\[\d+\]/g, "");
      const box = [...this.root.querySelectorAll("[data-field]")].filter((each) => !each.hidden &&
        (path === each.dataset.field || path.startsWith(each.dataset.field + "."))).at(-1);
      if (!box) {
        others.push(`${path} ${description}`);
        continue;
      }
      const line = [...box.children].find((child) => child.classList.contains("wrong"));
      line.textContent = description;
      line.hidden = false;
      const control = box.querySelector("input, select, textarea");
      if (control) control.setAttribute("aria-invalid", "true");
      this.unfold(box);
      first ||= control;
    }
    const rest = $("form-wrong");
    if (rest) {
      rest.textContent = others.join(" ");
      rest.hidden = !others.length;
    }
    if (first) first.focus();
  }
}
