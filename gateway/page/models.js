// The dialog with every model of the gateway: its state, and a button to load or unload it.

import { post } from "./api.js";
import { el } from "./dom.js";
import { about, bytes } from "./picker.js";
import { downloaded, sentence } from "./status.js";

const ACTS = {
  stopped: ["Load", "models/load"],
  failed: ["Load", "models/load"],
  "backing off": ["Load", "models/load"],
  ready: ["Unload", "models/unload"],
};

const dialog = document.getElementById("models");
const list = document.getElementById("models-list");
const rows = new Map(); // by the name of the model

/** Set up the dialog. `key()` returns the API key; `poll()` requests the status of the models. */
export function wire({ key, poll }) {
  document.getElementById("status").addEventListener("click", () => {
    dialog.showModal();
    poll();
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  list.addEventListener("click", async ({ target }) => {
    const { model, path } = target.dataset;
    if (!path) return;
    const row = rows.get(model);
    row.trouble.textContent = "";
    row.busy = true;
    row.button.disabled = true;
    try {
      await post(path, { model }, key());
    } catch (error) {
      row.trouble.textContent = error.message;
    }
    row.busy = false;
    poll();
  });
}

/** Show the current models of `/api/status` with their `cards` by name. Rows are reused, so that the focus stays. */
export function update(models, cards) {
  for (const [name, { element }] of rows) {
    if (models.some((model) => model.name === name)) continue;
    element.remove();
    rows.delete(name);
  }
  for (const model of models) {
    if (!rows.has(model.name)) rows.set(model.name, begun(model.name));
    show(rows.get(model.name), model, cards[model.name]);
  }
}

function begun(name) {
  const row = {
    about: el("p", { className: "state" }),
    state: el("p", { className: "state" }),
    trouble: el("p", { className: "trouble", role: "alert" }),
    progress: el("progress", { "aria-label": `Download of ${name}`, hidden: true }),
    button: el("button", { type: "button", className: "wide" }),
    busy: false,
  };
  row.element = el("li", {}, el("div", {}, el("h3", {}, name), row.about, row.state, row.progress, row.trouble), row.button);
  row.button.dataset.model = name;
  list.append(row.element);
  return row;
}

function show({ about: line, state, progress, button, busy }, model, card) {
  const aliases = card?.meta.aliases.length ? [` · also named ${card.meta.aliases.join(", ")}`] : [];
  const shown = card ? [...about(card), ...aliases] : [];
  const words = shown.map((part) => part.textContent ?? part).join("");
  if (line.textContent !== words) line.replaceChildren(...shown);
  const memory = model.memory_bytes ? [`${bytes(model.memory_bytes)} of memory`] : [];
  const text = [sentence(model), ...memory].join(" · ");
  if (state.textContent !== text) state.textContent = text;
  const part = downloaded(model);
  progress.hidden = part === null;
  progress.value = part ?? 0;
  // A variant with an adapter or a draft model is loaded by the request that asks for it.
  const [label, path] = ACTS[model.state] ?? ["Load", ""];
  button.textContent = label;
  button.setAttribute("aria-label", `${label} ${model.name}`);
  button.dataset.path = path;
  button.disabled = busy || !path;
}
