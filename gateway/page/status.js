// What the chosen model is doing: asked for by the clock, more often while an answer is written.

import { read } from "./api.js";

const IDLE_MS = 5000;
const RUNNING_MS = 1000;
const WORDS = {
  stopped: "loads with the first message",
  starting: "starting …",
  loading: "loading …",
  unloading: "unloading …",
  ready: "ready",
};

const line = document.getElementById("status");
const text = document.getElementById("status-text");
const dot = document.getElementById("status-dot");

let timer = 0;
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
  timer = setTimeout(look, asking.running() ? RUNNING_MS : IDLE_MS);
}

function show(model, trouble) {
  const told = trouble ?? (model ? sentence(model) : "");
  const running = Boolean(model?.running);
  dot.className = `dot ${trouble || model?.error ? "bad" : (model?.state ?? "")} ${running ? "busy" : ""}`;
  if (text.textContent !== told) text.textContent = told;
  line.title = model?.error ?? "";
}

function sentence(model) {
  if (model.error) return "failed, see the message";
  if (model.state !== "ready") return model.progress || (WORDS[model.state] ?? model.state);
  const slots = model.slots ? `${model.running} of ${model.slots} slots` : `${model.running} running`;
  const rate = model.running ? model.tokens_per_second : 0;
  return rate ? `${slots} · ${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s` : model.running ? slots : `ready · ${slots}`;
}
