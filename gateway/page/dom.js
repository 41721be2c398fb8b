// Creates elements. Text always becomes a text node, never HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties, attributes (keys with a dash, and role), listeners and children. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== undefined && child !== ""));
  return made;
}

/** One of the symbols of index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** A button with an icon and no border; `label` is its accessible name. */
export function iconButton(name, label, act, properties = {}) {
  return el(
    "button",
    { type: "button", className: "quiet", title: label, "aria-label": label, onclick: act, ...properties },
    icon(name),
  );
}

/** A button that copies the result of `text()`, and shows that it has. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const done = await copied(text());
    button.replaceChildren(icon(done ? "done" : "close"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

// The clipboard API exists only on https and localhost, not for a gateway elsewhere in the network.
async function copied(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // The browser may refuse; the code below needs no permission.
    }
  }
  const field = el("textarea", { value: text, className: "unseen" });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
