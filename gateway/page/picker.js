// The field in which a model is chosen, with the size, the context and the abilities of each.

import { el } from "./dom.js";

const BADGES = ["vision", "audio", "tools", "thinking"];

const select = document.getElementById("model");
let cards = []; // of the models that chat
let names = {}; // by name or alias, the model's own name
let offered = ""; // what the options show, as JSON

/** Offer the models of `/v1/models` that chat. Returns how many there are. */
export function offer(all) {
  names = Object.fromEntries(all.map(({ id, meta }) => [id, meta.alias_of ?? id]));
  cards = all.filter(({ id, meta }) => names[id] === id && meta.abilities.includes("completion"));
  const current = JSON.stringify(cards.map(({ id, meta }) => [id, meta]));
  if (current === offered) return cards.length;
  offered = current;
  const { value } = select;
  for (const option of [...select.options]) option.remove();
  select.append(...cards.map((card) => el("option", { value: card.id }, el("span", {}, card.id), el("span", { className: "more" }, " · ", ...about(card)))));
  select.value = value;
  return cards.length;
}

/**
 * Choose a model by name or alias. If there is no such model, the choice stays; without a choice, or if
 * that model failed, a loaded model is preferred, and one that failed is the last resort.
 */
export function choose(name) {
  const wanted = card(names[name]) ?? card(select.value, ({ failed }) => !failed);
  const best = ["loaded", "loading", "unloaded"].map((value) => cards.find(({ status }) => status.value === value && !status.failed));
  select.value = (wanted ?? best.find(Boolean) ?? cards[0])?.id ?? "";
}

/** The item of `/v1/models` for a model; undefined if there is none. */
export function card(name, holds = () => true) {
  return cards.find(({ id, status }) => id === name && holds(status));
}

/** Size, context and abilities of a model, as text and badges. */
export function about({ meta }) {
  const known = [meta.size_bytes && bytes(meta.size_bytes), meta.context_size && `${meta.context_size.toLocaleString("en")} tokens`];
  const badges = BADGES.filter((one) => meta.abilities.includes(one)).map((one) => el("span", { className: "badge" }, one));
  return [known.filter(Boolean).join(" · "), ...badges.flatMap((badge) => [" ", badge])];
}

export function bytes(number) {
  const [unit, size] = number < 2 ** 30 ? ["MiB", 2 ** 20] : ["GiB", 2 ** 30];
  return `${(number / size).toFixed(number < 100 * size ? 1 : 0)} ${unit}`;
}
