// Short texts in localStorage or sessionStorage; where the browser blocks these, in this tab's memory.

const memory = {};

/** The text of that name; "" if there is none. `area`: "localStorage" or "sessionStorage". */
export function value(area, name) {
  try {
    return window[area].getItem(name) ?? "";
  } catch {
    return memory[name] ?? "";
  }
}

/** Store a text; an empty one is removed. */
export function setValue(area, name, text) {
  memory[name] = text;
  try {
    if (text) window[area].setItem(name, text);
    else window[area].removeItem(name);
  } catch {
    // The memory has it.
  }
}
