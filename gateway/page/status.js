// Polls the state of the models, more often while a model is loading or running.

import { read } from "./api.js";

const IDLE_MS = 5000;
const RUNNING_MS = 1000;
const WORDS = {
  stopped: "not loaded",
  starting: "starting …",
  loading: "loading …",
  stopping: "unloading …",
  failed: "failed",
  "backing off": "failed, pausing before the next attempt",
  broken: "invalid model file",
};
const CHANGING = ["starting", "loading", "stopping"];

const text = document.getElementById("status-text");
const dot = document.getElementById("status-dot");
const download = document.getElementById("download");

let timer = 0;
let changing = false;
let asking = { model: () => "", key: () => "", running: () => false, seen: () => {} };

/** Start polling. `seen(models, model)` is called with all models and the chosen one. */
export function watch(functions) {
  asking = functions;
  document.addEventListener("visibilitychange", poll);
  poll();
}

/** Poll now. */
export async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const { models } = await read("api/status", asking.key());
    const model = models.find(({ name }) => name === asking.model());
    changing = models.some(({ state }) => CHANGING.includes(state));
    show(model);
    asking.seen(models, model);
  } catch (error) {
    show(null, error.status !== 401 ? "no connection" : asking.key() ? "wrong API key" : "API key needed");
  }
  clearTimeout(timer);
  timer = setTimeout(poll, asking.running() || changing ? RUNNING_MS : IDLE_MS);
}

function show(model, trouble) {
  const shown = trouble ?? (model ? sentence(model) : "");
  const bad = trouble || ["failed", "backing off", "broken"].includes(model?.state);
  const busy = model?.running > 0 || ["starting", "loading"].includes(model?.state);
  dot.className = `dot ${bad ? "bad" : (model?.state ?? "")} ${busy ? "busy" : ""}`;
  if (text.textContent !== shown) text.textContent = shown;
  const part = model ? downloaded(model) : null;
  download.hidden = part === null;
  download.value = part ?? 0;
}

/** How much of a model has been downloaded, from 0 to 1; null without a download. */
export function downloaded({ state, download_mib: there, download_of_mib: all }) {
  return state === "loading" && all && there < all ? there / all : null;
}

/** The state of a model of `/api/status`, in words. */
export function sentence(model) {
  const { state, running, slots, tokens_per_second: rate, error } = model;
  const part = downloaded(model);
  if (part !== null) return `downloading: ${Math.floor(100 * part)} % of ${model.download_of_mib} MiB`;
  if (error && state in WORDS) return `${WORDS[state]}: ${error}`;
  if (state !== "ready") return WORDS[state] ?? state;
  if (!running) return "ready";
  const used = slots ? `${Math.min(running, slots)} of ${slots} slots` : `${running} running`;
  const waiting = slots && running > slots ? [`${running - slots} waiting`] : [];
  const speed = rate ? [`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`] : [];
  return [...speed, used, ...waiting].join(" · ");
}

/** What an answer of a model has been waiting for, "" if only for its tokens. `size`: of the model, or "". */
export function waiting({ name, state, running, slots, download_mib: there, download_of_mib: all }, size, seconds) {
  const time = `… ${Math.floor(seconds)} s`;
  if (state === "loading" && all && there < all) return `Downloading ${name}: ${there} of ${all} MiB ${time}`;
  if (CHANGING.includes(state)) return `Loading ${name}${size && ` (${size})`} ${time}`;
  return slots && running > slots ? `All ${slots} slots of ${name} are in use: waiting ${time}` : "";
}
