// The settings: kept in localStorage, all but the API key, which this tab alone remembers.

import { wrongTools } from "./request.js";

const PLACE = "settings";
const KEY_PLACE = "api-key";
const dialog = document.getElementById("settings");
const form = dialog.querySelector("form");
const toolsError = document.getElementById("tools-error");

let kept = {};
try {
  kept = JSON.parse(localStorage.getItem(PLACE)) ?? {};
} catch {
  localStorage.removeItem(PLACE);
}

/** The settings by name; what is empty is not set. */
export function settings() {
  return kept;
}

export function apiKey() {
  return sessionStorage.getItem(KEY_PLACE) ?? "";
}

/** Change some settings, by name. */
export function set(changes) {
  kept = { ...kept, ...changes };
  localStorage.setItem(PLACE, JSON.stringify(kept));
}

/** Show the dialog, at the field of that name. */
export function open(name) {
  for (const field of fields()) field.value = field.name === "key" ? apiKey() : (kept[field.name] ?? "");
  showWrong();
  if (!dialog.open) dialog.showModal();
  if (name) form.elements[name].focus();
}

/** Show in empty fields what the model does without them; `defaults`: its numbers by name. */
export function showDefaults(defaults = {}) {
  for (const field of fields()) {
    if (field.name in defaults) field.placeholder = defaults[field.name];
  }
}

/** Make the dialog work; `closed` is told whether the key is another one now. */
export function wire(closed) {
  let keyBefore = apiKey();
  document.getElementById("open-settings").addEventListener("click", () => open());
  document.getElementById("reset").addEventListener("click", () => {
    for (const field of fields()) field.value = "";
    read();
    showWrong();
  });
  form.addEventListener("input", () => {
    read();
    showWrong();
  });
  form.addEventListener("submit", (event) => {
    if (wrongTools(kept.tools)) event.preventDefault();
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog && form.reportValidity() && !wrongTools(kept.tools)) dialog.close();
  });
  // Closed with Escape, a field that is out of bounds keeps its last good value.
  dialog.addEventListener("close", () => {
    closed(apiKey() !== keyBefore);
    keyBefore = apiKey();
    // Chromium returns the focus to a text field, but not always the caret.
    const back = document.activeElement;
    if (back instanceof HTMLTextAreaElement) {
      back.blur();
      back.focus();
    }
  });
}

function fields() {
  return [...form.elements].filter((field) => field.name);
}

function read() {
  const given = fields().filter((field) => field.name !== "key" && field.validity.valid);
  set(Object.fromEntries(given.map((field) => [field.name, field.value])));
  const key = form.elements.key.value.trim();
  if (key) sessionStorage.setItem(KEY_PLACE, key);
  else sessionStorage.removeItem(KEY_PLACE);
}

function showWrong() {
  const wrong = wrongTools(kept.tools);
  toolsError.hidden = !wrong;
  toolsError.textContent = wrong ?? "";
}
