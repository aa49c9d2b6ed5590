// SPDX-License-Identifier: Apache-2.0
// The pictures: a card for each request, the latest first, and a closer look at one picture.
import {$, count, duration, h, plain, put, say, sentence} from "./dom.js";
import {token} from "./api.js";
import {forms} from "./copy.js";
import {newSeed} from "./job.js";

/** Noise, as pictures begin. */
const noise = (() => {
  const canvas = h("canvas", {width: 48, height: 48});
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(48, 48);
  for (let i = 0; i < pixels.data.length; i += 4) {
    const value = 128 + (Math.random() + Math.random() + Math.random() - 1.5) * 130;
    pixels.data.set([value, value, value, 255], i);
  }
  context.putImageData(pixels, 0, 0);
  return `url(${canvas.toDataURL()})`;
})();

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // only pages of https and of loopback may
    const area = h("textarea", {class: "hidden", value: text});
    (document.querySelector("dialog[open]") || document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function copyMenu(params) {
  const menu = h("details", {class: "menu"}, h("summary", {}, "Copy as"));
  menu.append(h("div", {}, Object.entries(forms).map(([name, form]) => h("button", {type: "button",
    onclick: async () => {
      await copy(form(params(), Boolean(token.get())));
      menu.open = false;
      menu.firstChild.textContent = "Copied";
      say(`Copied as ${name}`);
      setTimeout(() => (menu.firstChild.textContent = "Copy as"), 1500);
    }}, name))));
  menu.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && menu.open) {
      event.stopPropagation();
      event.preventDefault();
      menu.open = false;
      menu.firstChild.focus();
    }
  });
  menu.addEventListener("focusout", (event) => menu.contains(event.relatedTarget) || (menu.open = false));
  return menu;
}

/** The request of one picture of a job alone. */
export function single(job, index) {
  const params = structuredClone(job.params);
  const {seed, label} = job.images[index];
  params.seed = seed || String(BigInt.asUintN(64, BigInt(params.seed) + BigInt(index)));
  params.count = 1;
  if (label !== undefined) params.conditions = [{class_label: label}];
  else if (params.conditions?.length > 1) params.conditions = [params.conditions[index]];
  return params;
}

export class Feed {
  /** `models()` are those of the server. */
  constructor(root, {models, onrepeat, onfill, onstart}) {
    Object.assign(this, {root, models, onrepeat, onfill, onstart});
    this.cards = [];
    const dialog = $("picture");
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    dialog.addEventListener("close", () => (this.shown = null));
    dialog.addEventListener("keydown", (event) => {
      const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (step && this.shown) this.look(this.shown.job, this.shown.index + step);
    });
  }

  add(job) {
    $("empty").hidden = true;
    const card = new Card(this, job);
    this.cards.unshift(card);
    this.root.prepend(card.root);
    return card;
  }

  remove(card) {
    card.root.remove();
    card.job.dispose();
    this.cards.splice(this.cards.indexOf(card), 1);
    $("empty").hidden = this.cards.length > 0;
    this.root.focus();
  }

  /** The picture that is shown from this address: a page may not fetch its own blobs. */
  blobOf(url) {
    return this.cards.flatMap((card) => card.job.images).find((image) => image.url === url)?.blob;
  }

  labelOf(job, label) {
    const model = this.models().find((each) => each.name === job.params.model.split("@")[0]);
    return (model && model.labels[label]) || String(label);
  }

  title(job) {
    const {conditions = []} = job.params, [first = {}] = conditions;
    if (first.text !== undefined) return first.text || "(no prompt)";
    if (first.class_label !== undefined) {
      const labels = new Set(conditions.map((each) => each.class_label));
      return [...labels].map((label) => this.labelOf(job, label)).join(", ");
    }
    if (first.class_vector?.length) return conditions.flatMap((each) => each.class_vector).join(", ");
    return "Random classes";
  }

  /** Shows a picture of a job in full. */
  look(job, index) {
    const image = job.images[index];
    if (!image || !(image.url || image.preview)) return;
    this.shown = {job, index};
    const dialog = $("picture"), effective = job.effective || {}, run = job.ran || {};
    const [condition = {}] = job.params.conditions || [];
    const facts = [["Seed", image.seed], ["Class", image.label !== undefined && this.labelOf(job, image.label)],
      ["Prompt", condition.text],
      ["Negative", condition.negative_text],
      ["Model", effective.model && `${effective.model}@${run.model_version}`],
      ["Size", image.width && `${image.width} × ${image.height}`],
      ["Steps", run.steps && (run.evaluations === run.steps ? run.steps
        : `${run.steps} (${run.evaluations} evaluations)`)],
      ["Sampler", effective.sampler && `${plain(effective.sampler, "SAMPLER_")}, ` +
        plain(effective.noise_schedule, "NOISE_SCHEDULE_")],
      ["Guidance", effective.guidance_scale > 1 && effective.guidance_scale],
      ["Strength", effective.init_image && effective.init_image.strength]];
    const extension = {"image/jpeg": "jpg", "image/webp": "webp"}[image.type] || "png";
    const act = (action) => () => {
      dialog.close();
      action();
    };
    const focused = document.activeElement?.dataset.key;
    put(dialog, h("form", {method: "dialog"},
      h("img", {src: image.url || image.preview, alt: this.alt(job, index), class: "large",
        draggable: "false", ...this.crisp(image)}),
      h("div", {class: "facts"},
        h("dl", {}, facts.filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))])),
        h("div", {class: "buttons wrap"},
          image.url ? h("a", {class: "button", href: image.url, download: `${job.params.model}-${image.seed}.${extension}`}, "Save") : null,
          image.blob ? h("button", {type: "button", onclick: act(() => this.onstart(image.blob))}, "Start from this") : null,
          h("button", {type: "button", onclick: act(() => this.onfill(single(job, index)))}, "Edit settings"),
          copyMenu(() => single(job, index))),
        h("div", {class: "buttons"},
          h("button", {type: "button", "data-key": "before", "aria-label": "The picture before", disabled: index === 0,
            onclick: () => this.look(job, index - 1)}, "←"),
          h("button", {type: "button", "data-key": "next", "aria-label": "The next picture", disabled: index + 1 >= job.images.length,
            onclick: () => this.look(job, index + 1)}, "→"),
          h("span"), h("button", {class: "primary"}, "Close")))));
    if (!dialog.open) dialog.showModal();
    // The focus stays in the dialog, whose keys go on to other pictures.
    else (dialog.querySelector(`[data-key="${focused}"]:enabled`) || dialog.querySelector(".primary")).focus();
  }

  /** The picture that is shown in full may have come further. */
  changed(job) {
    if (this.shown?.job !== job) return;
    const image = job.images[this.shown.index], large = $("picture").querySelector(".large");
    if (image.url && large.src !== image.url) this.look(job, this.shown.index);
    else if (image.preview && large.src !== image.preview) large.src = image.preview;
  }

  /** Pictures of few pixels stay sharp when they are shown large. */
  crisp(image) { return image.width && image.width <= 128 ? {"data-crisp": ""} : {}; }

  alt(job, index) {
    const image = job.images[index];
    const what = image.label !== undefined ? this.labelOf(job, image.label) : this.title(job);
    if (!image.done) return `${what}, picture ${index + 1} of ${job.images.length}, emerging`;
    return `${what}, seed ${image.seed}`;
  }
}

class Card {
  constructor(feed, job) {
    this.feed = feed;
    this.job = job;
    this.said = "";
    const title = feed.title(job);
    this.status = h("p", {class: "status"});
    this.bar = h("progress", {max: 1, value: 0, "aria-label": "Progress"});
    this.meta = h("p", {class: "meta"});
    this.cancel = h("button", {type: "button", class: "cancel", onclick: () => {
      job.cancel();
      this.changed();
    }}, "Cancel");
    this.actions = h("div", {class: "buttons wrap", hidden: true});
    this.tiles = job.images.map((_, index) => {
      const img = h("img", {alt: "", draggable: "true", hidden: true,
        ondragstart: (event) => {
          const {url} = job.images[index];
          if (url) event.dataTransfer.setData("text/x-denoised", url);
        }});
      const tile = h("button", {type: "button", class: "tile", "aria-label": `Picture ${index + 1}, waiting`,
        onclick: () => feed.look(job, index)}, img, h("span", {class: "caption"}));
      tile.style.backgroundImage = noise;
      const {width, height} = job.params;
      if (width && height) tile.style.aspectRatio = `${width} / ${height}`;
      return tile;
    });
    this.root = h("article", {class: "card", "data-job": job.id, "aria-label": title},
      h("div", {class: "head"}, h("div", {}, h("h2", {title}, title), this.meta), this.status, this.cancel),
      this.bar,
      h("div", {class: "tiles", "data-count": job.images.length > 16 ? "many" : Math.min(job.images.length, 9)}, this.tiles),
      this.actions);
    this.root.job = job;
    this.ticking = setInterval(() => this.tick(), 500);
    this.update();
  }

  /** Notes when the first picture is on the screen, decoded and in a frame, and how many evaluations it then has. */
  async noteFirst(img, image) {
    try {
      await img.decode();
    } catch {
      return;  // the next preview has taken its place
    }
    requestAnimationFrame(() => requestAnimationFrame(() => {
      if (this.root.dataset.firstPreview || !image.evaluation) return;
      this.root.dataset.firstPreview = image.evaluation;
      performance.mark(`first-preview ${this.job.id}`);
    }));
  }

  /** Draws at most once for each frame, however fast events come. */
  changed() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.update();
    });
    // A tab in the background has no frames.
    if (document.hidden) {
      cancelAnimationFrame(this.frame);
      this.frame = 0;
      this.update();
    }
  }

  tick() {
    if (this.job.state === "queued") this.statusLine();
    if (!this.job.running) clearInterval(this.ticking);
  }

  statusLine() {
    const {job} = this;
    let text = "";
    if (job.state === "sending") {
      text = job.begun ? "Sending" : "Waits for requests that run";
    } else if (job.state === "queued") {
      const {position, ahead, start, total, at} = job.queue;
      const left = (seconds) => Math.max(0, seconds - (performance.now() - at) / 1000);
      text = position > 0 ? `Queued behind ${count(position, "request")} (${count(ahead, "picture")})` : "Next";
      if (start !== undefined && left(start) >= 1) text += `, starts in ${duration(left(start))}`;
      if (total !== undefined && left(total) >= 1) text += `, done in ${duration(left(total))}`;
    } else if (job.state === "running") {
      const {done = 0, of = 0} = job.progress || {};
      text = of ? `${Math.floor(100 * done / of)} %` : "Drawing";
    } else if (job.state === "waiting") {
      text = `${sentence(job.reason)} Trying again…`;
    } else if (job.state === "done") {
      text = duration(job.timing.total_seconds);
    } else if (job.state === "cancelled") {
      text = "Cancelled";
    }
    if (job.cancelling && job.running) text = "Cancelling…";
    if (job.notCancelled && job.running) text += `. Not cancelled: ${sentence(job.notCancelled)}`;
    this.status.textContent = text;
  }

  update() {
    const {job, feed} = this;
    this.root.dataset.state = job.state;
    this.root.dataset.restarts = job.restarts;
    this.statusLine();
    const {done = 0, of = 1} = job.progress || {};
    this.bar.value = job.state === "done" ? 1 : done / of;
    this.bar.hidden = !job.running;
    const effective = job.effective;
    this.meta.textContent = effective
      ? [effective.model, `seed ${effective.seed}`, count(effective.steps, "step"),
        plain(effective.sampler, "SAMPLER_")].join(" · ")
      : job.params.model;
    job.images.forEach((image, index) => {
      const tile = this.tiles[index], source = image.url || image.preview;
      const [img, caption] = tile.children;
      if (effective && !tile.style.aspectRatio) tile.style.aspectRatio = `${effective.width} / ${effective.height}`;
      if (source && image.source !== source) {
        image.source = img.src = source;
        img.hidden = false;
        if (!this.root.dataset.firstPreview) this.noteFirst(img, image);
        if (effective && effective.width <= 128) img.dataset.crisp = "";
      }
      if (!image.done && image.evaluation && image.shownAt !== image.evaluation) {
        image.shownAt = image.evaluation;
        tile.style.setProperty("--done", image.evaluation / image.evaluations);
      }
      tile.dataset.state = image.done ? "done" : source ? "emerging" : "waiting";
      if (image.done) caption.textContent = image.seed;
      const alt = feed.alt(job, index);
      if (tile.getAttribute("aria-label") !== alt) tile.setAttribute("aria-label", alt);
      tile.hidden = !job.running && !source;
    });
    feed.changed(job);
    this.buttons();
    const news = job.running && job.cancelling ? "Cancelling"
      : job.running && job.notCancelled ? `Not cancelled: ${sentence(job.notCancelled)}`
      : {done: `${count(job.images.length, "picture")} drawn: ${feed.title(job)}`,
      failed: `Failed: ${job.error && job.error.message}`, cancelled: "Cancelled",
      queued: "In the queue", waiting: job.state === "waiting" && `${sentence(job.reason)} Trying again`}[job.state];
    if (news && news !== this.said) {
      say(news);
      this.said = news;
    }
  }

  buttons() {
    const {job, feed} = this;
    const kind = job.running ? "running" : job.state;
    if (kind === this.kind) return;
    const focused = document.activeElement === this.cancel;
    this.kind = kind;
    this.cancel.hidden = !job.running;
    this.actions.hidden = job.running;
    if (!job.running) {
      const repeat = (seed) => () => feed.onrepeat(seed ? {...job.params, seed} : job.params);
      put(this.actions, ...(job.error ? [h("p", {class: "wrong", role: "alert"}, job.error.violations.length
          ? job.error.violations.map((each) => `${each.field.replace(/^params\./, "")} ${each.description}`).join("; ")
          : job.error.message)] : []),
        h("button", {type: "button", class: "repeat", title: "The same seeds: the same pictures", onclick: repeat()},
          job.state === "done" ? "Repeat" : "Try again"),
        h("button", {type: "button", title: "The same with other seeds", onclick: () => repeat(newSeed())()}, "New seeds"),
        h("button", {type: "button", onclick: () => feed.onfill(job.params)}, "Edit settings"),
        copyMenu(() => job.params),
        h("button", {type: "button", class: "quiet end", "aria-label": `Remove ${feed.title(job)}`,
          onclick: () => feed.remove(this)}, "Remove"));
      if (focused) this.actions.querySelector("button").focus();
    }
  }
}
