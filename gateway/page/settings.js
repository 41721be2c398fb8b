// The settings of the shown conversation, and those of this browser: the defaults of new
// conversations and the theme (in localStorage), and the API key (in this tab only).

import { FIELDS, wrongTools } from "./request.js";
import { setValue, value } from "./values.js";

const PLACE = "settings";
const KEY_PLACE = "api-key";
const dialog = document.getElementById("settings");
const form = dialog.querySelector("form");
const toolsError = document.getElementById("tools-error");
const asDefaults = document.getElementById("as-defaults");

let defaults = {};
try {
  defaults = JSON.parse(value("localStorage", PLACE) || null) ?? {};
} catch {
  // Damaged settings are replaced by the next ones.
}
let current = () => ({}); // the settings of the shown conversation, by name; an empty one is not set

/** The settings of a new conversation. */
export function initial() {
  return defaults;
}

export function apiKey() {
  return value("sessionStorage", KEY_PLACE);
}

/** Change settings of new conversations, by name. */
export function setInitial(changes) {
  defaults = { ...defaults, ...changes };
  setValue("localStorage", PLACE, JSON.stringify(defaults));
}

/** Store the API key until the tab closes. */
export function setApiKey(key) {
  setValue("sessionStorage", KEY_PLACE, key.trim());
}

function open() {
  for (const field of own()) field.value = current()[field.name] ?? "";
  form.elements.key.value = apiKey();
  form.elements.theme.value = value("localStorage", "theme");
  showWrong();
  dialog.showModal();
}

/** Show the model's defaults in empty fields; `values`: by name. */
export function showDefaults(values = {}) {
  for (const field of own()) {
    if (field.name in values) field.placeholder = values[field.name];
  }
}

/**
 * Set up the dialog. `shown()`: returns the settings of the shown conversation, which are changed in
 * that object; `changed()` is called after that, and `closed(keyChanged)` when the dialog is closed.
 */
export function wire({ shown, changed, closed }) {
  current = shown;
  let keyBefore = apiKey();
  const took = () => {
    read();
    showWrong();
    changed();
  };
  document.getElementById("open-settings").addEventListener("click", open);
  document.getElementById("reset").addEventListener("click", () => {
    for (const field of own()) field.value = "";
    took();
  });
  asDefaults.addEventListener("click", () => {
    setInitial({ ...Object.fromEntries(FIELDS.map((name) => [name, ""])), ...current() });
    showWrong();
  });
  form.addEventListener("input", took);
  form.addEventListener("change", took); // Chromium's headless shell sends no input for a list
  form.addEventListener("submit", (event) => {
    if (wrongTools(current().tools)) event.preventDefault();
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog && form.reportValidity() && !wrongTools(current().tools)) dialog.close();
  });
  // If Escape closes the dialog, an invalid field keeps its last valid value.
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

// The fields of the conversation.
function own() {
  return [...form.elements].filter((field) => FIELDS.includes(field.name));
}

function read() {
  for (const field of own()) {
    if (field.validity.valid) current()[field.name] = field.value;
  }
  setApiKey(form.elements.key.value);
  setValue("localStorage", "theme", form.elements.theme.value);
  applyTheme(form.elements.theme.value);
}

function showWrong() {
  const wrong = wrongTools(current().tools);
  toolsError.hidden = !wrong;
  toolsError.textContent = wrong ?? "";
  const same = FIELDS.every((name) => (current()[name] ?? "") === (defaults[name] ?? ""));
  asDefaults.disabled = same || Boolean(wrong);
}
