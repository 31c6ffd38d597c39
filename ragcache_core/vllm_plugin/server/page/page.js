// The page: polls once a second while it is visible, and shows the answers.

import { History, showHottest, showQueue, showSources, showTiers, showTtft } from "./cards.js";
import { byId, count, el } from "./dom.js";
import { RequestList } from "./requests.js";
import { ask, key, NotForTenants, Refused } from "./server.js";
import { TreePicture } from "./tree.js";

const PAUSE_MS = 1000;
const NODES = 300;
const REQUESTS = 100;

const tree = new TreePicture();
const list = new RequestList();
let history = new History();
let before = ""; // what was told last of the whole: as long as it is the same, nothing else has changed
let numRequests = 0;
let recent = null;
let trees = [];
let isTenant = false; // the key is a tenant's: it opens his own statistics alone
let isAsking = false;
let timer = 0;

async function look() {
  clearTimeout(timer);
  if (isAsking) return;
  isAsking = true;
  try {
    await update();
    if (isPaused() || !byId("door").hidden) return undefined; // changed during the update
    byId("main").hidden = false;
    byId("main").classList.remove("stale");
    tell("live", "live");
  } catch (error) {
    before = "";
    if (error instanceof Refused) return askForKey(error.message);
    byId("main").classList.add("stale");
    tell("lost", `no answer (${error.message}): trying again`);
  } finally {
    isAsking = false;
  }
  return schedule();
}

function schedule() {
  clearTimeout(timer);
  if (!document.hidden && !isPaused() && byId("door").hidden) timer = setTimeout(look, PAUSE_MS);
}

async function update() {
  const [stats, load] = await Promise.all([ask("v1/ragcache/stats"), ask("v1/ragcache/load")]);
  byId("leave").hidden = key.read() === null;
  if (stats.num_requests < numRequests) history = new History(); // the engine was restarted
  numRequests = stats.num_requests;
  const now = JSON.stringify([stats, load]);
  const isBusy = recent !== null && recent.num_queued + recent.num_running > 0;
  if (now !== before || isBusy) {
    if (!isTenant) await showOperators();
    showHottest(stats);
    before = now;
  } else {
    list.draw();
  }
  byId("tenant").hidden = !isTenant;
  for (const section of document.querySelectorAll(".operators")) section.hidden = isTenant;
  byId("about").textContent = `${stats.policy}, ${count(stats.num_requests)} requests, ${count(stats.num_nodes)} nodes`;
  showTiers(stats, history);
  showQueue(stats, load, recent);
  if (isTenant) return;
  showSources(recent.requests, history);
  showTtft(recent.requests);
}

// Ask what only an operator's key opens: the tree, and everybody's latest requests.
async function showOperators() {
  try {
    const [told, latest] = await Promise.all([
      ask(`v1/ragcache/tree?limit=${NODES}`),
      ask(`v1/ragcache/requests?limit=${REQUESTS}`),
    ]);
    recent = latest;
    if (JSON.stringify(told.engines) !== JSON.stringify(trees)) {
      trees = told.engines;
      showTree();
    }
    list.show(recent.requests);
  } catch (error) {
    if (!(error instanceof NotForTenants)) throw error;
    isTenant = true;
    recent = null;
  }
}

function showTree() {
  const choice = byId("engine");
  if (choice.options.length !== trees.length) {
    choice.replaceChildren(...trees.map((_, i) => el("option", { value: i }, `${i}`)));
  }
  byId("engine-choice").hidden = trees.length < 2;
  tree.show(trees[choice.value || 0]);
}

function tell(state, text) {
  const shown = byId("state");
  if (shown.dataset.state === state && shown.textContent === text) return;
  shown.dataset.state = state;
  shown.textContent = text;
}

function askForKey(why) {
  key.forget();
  isTenant = false;
  before = "";
  byId("leave").hidden = true;
  byId("main").hidden = true;
  byId("door").hidden = false;
  byId("why").textContent = why;
  byId("key").value = "";
  byId("key").focus();
  tell("asks", "needs the key");
}

function isPaused() {
  return byId("pause").getAttribute("aria-pressed") === "true";
}

byId("door").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = byId("key").value.trim();
  if (!/^[\x20-\x7e]+$/.test(given)) return askForKey("A key has ASCII letters, digits and signs only.");
  key.keep(given);
  byId("door").hidden = true;
  byId("key").value = "";
  return look();
});
byId("leave").addEventListener("click", () => {
  clearTimeout(timer);
  askForKey("");
});
byId("pause").addEventListener("click", () => {
  const pauses = !isPaused();
  byId("pause").setAttribute("aria-pressed", String(pauses));
  byId("pause").textContent = pauses ? "continue" : "pause";
  if (pauses) {
    clearTimeout(timer);
    tell("paused", "paused");
  } else look();
});
byId("engine").addEventListener("change", showTree);
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : isPaused() || look()));
look();
