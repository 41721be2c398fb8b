// What the chosen model is doing: asked for by the clock, more often while an answer is written.

import { read } from "./api.js";

const IDLE_MS = 5000;
const RUNNING_MS = 1000;
const WORDS = {
  stopped: "not loaded",
  starting: "starting …",
  loading: "loading …",
  stopping: "unloading …",
  failed: "failed to load",
  "backing off": "crashed, waits a moment",
};

const text = document.getElementById("status-text");
const dot = document.getElementById("status-dot");

let timer = 0;
let changing = false;
let asking = { model: () => "", key: () => "", running: () => false };

/** Begin to watch; the functions tell what to look at. */
export function watch(functions) {
  asking = functions;
  document.addEventListener("visibilitychange", look);
  look();
}

/** Look now. */
export async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const { models } = await read("api/status", asking.key());
    show(models.find((model) => model.name === asking.model()));
  } catch (error) {
    show(null, error.status === 401 ? "an API key is needed" : "no connection");
  }
  clearTimeout(timer);
  timer = setTimeout(look, asking.running() || changing ? RUNNING_MS : IDLE_MS);
}

function show(model, trouble) {
  const told = trouble ?? (model ? sentence(model) : "");
  const bad = trouble || model?.state === "failed" || model?.state === "backing off";
  changing = ["starting", "loading", "stopping"].includes(model?.state);
  const busy = model?.running > 0 || ["starting", "loading"].includes(model?.state);
  dot.className = `dot ${bad ? "bad" : (model?.state ?? "")} ${busy ? "busy" : ""}`;
  if (text.textContent !== told) text.textContent = told;
}

function sentence({ state, running, slots, tokens_per_second: rate, ...load }) {
  if (load.download_of_mib && state === "loading") {
    const percent = Math.floor((100 * load.download_mib) / load.download_of_mib);
    return percent < 100 ? `downloading: ${percent} % of ${load.download_of_mib} MiB` : WORDS.loading;
  }
  if (state === "failed" && load.error) return `failed: ${load.error}`;
  if (state !== "ready") return WORDS[state] ?? state;
  const used = slots ? `${Math.min(running, slots)} of ${slots} slots` : `${running} running`;
  const waiting = slots && running > slots ? [`${running - slots} waiting`] : [];
  const speed = running && rate ? [`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`] : [];
  return [used, ...waiting, ...speed].join(" · ");
}
