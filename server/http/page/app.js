// SPDX-License-Identifier: Apache-2.0
// The page: tabs, the token, and what connects the form with the pictures.
import {ApiError, get, kept, token} from "./api.js";
import {$, notice, plain, say} from "./dom.js";
import {Feed} from "./feed.js";
import {Form} from "./form.js";
import {Job} from "./job.js";
import {Operate} from "./operate.js";

const kEvery = {draw: 5000, operate: 1000};  // milliseconds from one look at the server to the next

let models = [];
const jobs = new Set();

const form = new Form($("form"), {ondraw: draw, blobOf: (url) => feed.blobOf(url)});
const feed = new Feed($("feed"), {
  models: () => models,
  onrepeat: draw,
  onfill: (params) => form.fill(params),
  onstart: (blob) => form.setStart(blob).then(() => $("form").scrollIntoView()),
});
const operate = new Operate($("operate"), {onchange: refresh});

// A browser has six connections to a server, and each request that runs takes one. Cancel and Operate must find one
// too, so the tabs share four slots by locks. HTTP from another host has no locks, and they are denied where site data is
// blocked: there each tab has four.
const kSlots = 4;
function inSharedSlot(work) {
  return new Promise((done, failed) => navigator.locks.request("denoised", () => new Promise((next) => {
    const others = new AbortController();
    for (let i = 0; i < kSlots; ++i) {
      navigator.locks.request(`denoised ${i}`, {signal: others.signal}, () => {
        if (others.signal.aborted) return undefined;  // another slot was free as well
        others.abort();
        next();
        return work().then(done, failed);
      }).catch(() => {});  // aborted
    }
  })).catch(() => inOwnSlot(work).then(done, failed)));  // denied
}
let taken = 0;
const waiting = [];
async function inOwnSlot(work) {
  if (taken < kSlots) ++taken;
  else await new Promise((go) => waiting.push(go));
  try {
    await work();
  } finally {
    const next = waiting.shift();
    if (next) next();
    else --taken;
  }
}
const inSlot = navigator.locks ? inSharedSlot : inOwnSlot;

async function draw(params) {
  const job = new Job(params, {onsignin: signIn, onchange: () => {
    card.changed();
    if (job.state === "waiting") refresh();  // says why, if the server shuts down
  }});
  const card = feed.add(job);
  if (matchMedia("(max-width: 800px)").matches) card.root.scrollIntoView();
  jobs.add(job);
  await inSlot(() => job.run()).finally(() => jobs.delete(job));
  if (job.error && job.error.violations.length) form.wrong(job.error.violations);
}

// The token. One dialog serves all who wait for it.
let signingIn = null;
function signIn(why = "This server asks who calls.") {
  signingIn ||= new Promise((resolve) => {
    const dialog = $("token-dialog"), field = $("token-field");
    $("token-why").textContent = `${why} The token is kept for this tab alone, at most until the tab is closed.`;
    $("token-forget").hidden = !token.get();
    field.value = "";
    dialog.returnValue = "cancel";
    dialog.showModal();
    field.focus();
    dialog.addEventListener("close", () => {
      signingIn = null;
      const value = field.value.trim();
      field.value = "";
      if (dialog.returnValue === "forget") token.set("");
      const saved = dialog.returnValue === "save" && value !== "";
      if (saved) token.set(value);
      resolve(saved);
      refresh();
    }, {once: true});
  });
  return signingIn;
}
$("token").addEventListener("click", () => signIn("A token says who calls."));
// Enter in the field uses the token and does not press the first button.
$("token-field").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  $("token-save").click();
});

const kStates = {
  "starting": "The server is starting: its models are still loading.",
  "lame duck": "The server shuts down soon. It still takes requests.",
  "draining": "The server is shutting down: it finishes what it has, and refuses new requests.",
};
/** Looks at the server and shows what it says. Who asks during a look gets the next one. */
let looking = null, again = false;
function refresh() {
  again = true;
  looking ||= (async () => {
    while (again) {
      again = false;
      await look();
    }
  })().finally(() => (looking = null));
  return looking;
}

let asked = false;
async function look() {
  try {
    const [list, server] = await Promise.all([get("/v1/models"), get("/v1/server")]);
    models = list.models;
    form.setModels(models);
    const state = plain(server.state, "SERVER_STATE_");
    $("state").dataset.state = state;
    $("state").textContent = state === "serving" ? "" : state;
    $("token").textContent = server.client && server.client !== "anonymous" ? server.client : "Token";
    $("token").hidden = server.client === "anonymous" && !(server.features || []).includes("SERVER_FEATURE_TOKENS");
    notice(state === "serving" ? "" : kStates[state] || `The server is ${state}.`);
    document.body.dataset.ready = "";
    if (!$("operate").hidden) await operate.refresh(models, server);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    $("state").dataset.state = "lost";
    $("state").textContent = error.http === 0 ? "not connected" : "";
    if (error.status === "UNAUTHENTICATED") {
      $("token").hidden = false;
      notice("This server draws only for clients with a token.");
      document.body.dataset.ready = "";
      if (!asked || token.get()) {
        asked = true;
        const unknown = token.get() !== "";
        token.set("");
        signIn(unknown ? "The server does not know this token." : undefined);
      }
    } else {
      notice(`${error.message} Trying again…`);
    }
  }
}

// Tabs, as in WAI-ARIA's pattern; the address remembers which.
const tabs = [...$("tabs").children];
function choose(tab, focus) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", String(chosen));
    each.tabIndex = chosen ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (focus) tab.focus();
  history.replaceState(null, "", tab.id === "tab-operate" ? "#operate" : location.pathname);
  if (tab.id === "tab-operate") refresh();
}
for (const tab of tabs) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    if (["ArrowLeft", "ArrowRight"].includes(event.key)) choose(tabs[1 - tabs.indexOf(tab)], true);
  });
}

// Colours: as the system, dark, light.
const themes = {"": "◐", dark: "●", light: "○"};
const choice = kept("localStorage", "denoised-theme");
function colour(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  $("theme").textContent = themes[theme];
  $("theme").title = `Colours: ${theme || "as the system"}`;
  $("theme").setAttribute("aria-label", $("theme").title);
}
$("theme").addEventListener("click", () => {
  const order = Object.keys(themes);
  const next = order[(order.indexOf(choice.get()) + 1) % order.length];
  choice.set(next);
  colour(next);
  say($("theme").title);
});
colour(choice.get());

window.addEventListener("pagehide", () => jobs.forEach((job) => job.leave()));
refresh().then(() => {
  performance.mark("interactive");
  if (location.hash === "#operate") choose(tabs[1]);
});
for (const [tab, every] of Object.entries(kEvery)) {
  setInterval(() => document.hidden || looking || $(tab).hidden || refresh(), every);
}
document.addEventListener("visibilitychange", () => document.hidden || refresh());
