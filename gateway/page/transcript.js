// Shows one message. A view is {element, update}; `update` shows changes of the message, and an answer's
// `wait(sentence)` shows what it is waiting for.
//
// `actions` are functions: `resend(message, text)`, `retry(message)`, `resume(message)` continues it,
// `rewrite(message, text)`, `removeMessage(message)`, `results(message)` returns the results of its tools,
// `versions(message)` all its versions, and `choose(version)` shows another one.

import { copyButton, el, icon, iconButton } from "./dom.js";
import { render } from "./markdown.js";

/** A question. */
export function questionView(message, actions) {
  const element = el("article", { className: "question", "aria-label": "You" });
  const images = (message.images ?? []).map((url, index) =>
    el("img", { src: url, alt: `Attached image ${index + 1}`, className: "thumb" }),
  );
  const files = (message.files ?? []).map(fileView);
  const show = () =>
    element.replaceChildren(
      ...(images.length ? [el("div", { className: "thumbs" }, ...images)] : []),
      ...files,
      ...(message.content ? [el("p", { className: "bubble" }, message.content)] : []),
      el(
        "footer",
        {},
        copyButton("Copy the message", () => message.content),
        iconButton("edit", "Edit and send again", edit, { "data-edit": "" }),
        iconButton("bin", "Delete the message", () => actions.removeMessage(message)),
        ...stepper(message, actions),
      ),
    );

  function edit() {
    const save = (text) => (text || images.length || files.length) && actions.resend(message, text);
    editIn(element, { text: message.content, label: "Edit the message", button: "Send", save, cancel: show });
  }

  show();
  return { element, update: show };
}

// Show a form instead of a message. `save(text)` accepts the text, and `cancel()` shows the message.
function editIn(element, { text, label, button, save, cancel }) {
  const field = el("textarea", { value: text, rows: 3, "aria-label": label });
  const done = (event) => {
    event.preventDefault();
    save(field.value.trim());
  };
  const leave = () => {
    cancel();
    element.querySelector("footer [data-edit]").focus();
  };
  const form = el(
    "form",
    { className: "edit", onsubmit: done },
    field,
    el("button", { type: "button", className: "quiet", onclick: leave }, "Cancel"),
    el("button", { type: "submit", className: "solid" }, button),
  );
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      leave();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) done(event);
  });
  element.replaceChildren(form);
  field.focus();
}

// An attached file; unfolding it shows its text.
function fileView({ name, text }) {
  const content = el("pre", { tabIndex: 0 });
  const size = `${text.length.toLocaleString("en")} characters`;
  const view = el("details", { className: "file" }, el("summary", {}, icon("file"), el("span", {}, name), el("small", {}, size)), content);
  view.addEventListener("toggle", () => (content.textContent = view.open ? text : ""));
  return view;
}

/** An answer. */
export function answerView(message, actions) {
  const summary = el("summary", {});
  const thought = el("div", { className: "markdown" });
  const reasoning = el("details", { className: "reasoning", hidden: true }, summary, thought);
  const body = el("div", { className: "markdown body" });
  const calls = el("div", { className: "calls" });
  const trouble = el("p", { className: "error", role: "alert", hidden: true });
  const facts = el("span", { className: "facts" });
  const copy = copyButton("Copy the answer", () => message.content);
  const retry = iconButton("retry", "Retry", () => actions.retry(message));
  const resume = iconButton("play", "Continue", () => actions.resume(message), { className: "quiet resume" });
  const change = iconButton("edit", "Edit the answer", edit, { "data-edit": "" });
  const bin = iconButton("bin", "Delete the answer", () => actions.removeMessage(message));
  const footer = el("footer", {}, copy, retry, resume, change, bin, ...stepper(message, actions), facts);
  const reason = el("span", { className: "unseen" }, "Waiting for the answer");
  const waiting = el("p", { className: "waiting" }, reason);
  const parts = [reasoning, body, calls, waiting, trouble, footer];
  const element = el("article", { className: "answer", "aria-label": "Answer" }, ...parts);

  function edit() {
    const save = (text) => text && actions.rewrite(message, text);
    const cancel = () => element.replaceChildren(...parts);
    editIn(element, { text: message.content, label: "Edit the text of the answer", button: "Save", save, cancel });
  }

  function update() {
    const running = message.state === "running";
    element.dataset.state = message.state;
    element.setAttribute("aria-busy", String(running));
    reasoning.hidden = !message.reasoning;
    if (message.reasoning) {
      summary.textContent = thinking(message);
      // Folded text is rendered only when it is unfolded.
      if (reasoning.open || !running) render(thought, message.reasoning, running);
    }
    render(body, message.content, running);
    showCalls(calls, message, actions);
    waiting.hidden = !running || Boolean(message.content);
    if (message.reasoning) wait("");
    trouble.hidden = message.state !== "failed";
    trouble.textContent = message.error ?? "";
    footer.hidden = running;
    copy.hidden = change.hidden = !message.content;
    resume.hidden = !message.content || message.calls.length > 0;
    facts.textContent = factsOf(message);
  }

  function wait(sentence) {
    reason.className = sentence ? "" : "unseen";
    reason.textContent = sentence || "Waiting for the answer";
  }

  reasoning.addEventListener("toggle", () => {
    if (reasoning.open) render(thought, message.reasoning, message.state === "running");
  });
  update();
  return { element, update, wait };
}

// Buttons for the versions of a message, if there are several.
function stepper(message, actions) {
  const all = actions.versions(message);
  if (all.length < 2) return [];
  const at = all.indexOf(message);
  const step = (by, name, label) => iconButton(name, label, () => actions.choose(all[at + by]), { disabled: !all[at + by] });
  return [
    step(-1, "back", "Earlier version"),
    el("span", { className: "version" }, `${at + 1} of ${all.length}`),
    step(1, "forth", "Later version"),
  ];
}

function thinking(message) {
  const seconds = message.facts?.thought;
  if (seconds === undefined) return message.state === "running" ? "Thinking …" : "Thought";
  return `Thought for ${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
}

function factsOf(message) {
  const { first, tokens, rate, finish, edited } = message.facts ?? {};
  const parts = message.model ? [message.model] : [];
  if (edited) parts.push("edited");
  if (message.state === "stopped") parts.push("stopped");
  if (finish === "length") parts.push("cut at the token limit");
  if (tokens) parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (rate) parts.push(`${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s`);
  if (first) parts.push(`first token after ${first.toFixed(first < 10 ? 2 : 0)} s`);
  return parts.join(" · ");
}

function showCalls(container, message, actions) {
  const source = JSON.stringify([message.calls, message.state, actions.results(message)]);
  if (container.dataset.source === source) return;
  container.dataset.source = source;
  const results = actions.results(message);
  const open = message.state === "done" && message.calls.length > 0 && results.length === 0;
  const fields = [];
  const cards = message.calls.map((call, index) => {
    const card = el(
      "section",
      { className: "call", "aria-label": `Call of ${call.name}` },
      el("h3", {}, icon("tool"), call.name),
      el("pre", { tabIndex: 0 }, el("code", {}, pretty(call.arguments))),
    );
    if (results[index]) card.append(el("p", { className: "result" }, results[index].content));
    else if (open) {
      fields.push(el("textarea", { rows: 2, required: true, placeholder: "Result of the tool", "aria-label": `Result of ${call.name}` }));
      card.append(fields[fields.length - 1]);
    }
    return card;
  });
  if (!open) {
    container.replaceChildren(...cards);
    return;
  }
  const send = (event) => {
    event.preventDefault();
    actions.answerCalls(message, fields.map((field) => field.value));
  };
  const button = el("button", { type: "submit", className: "solid" }, fields.length > 1 ? "Send the results" : "Send the result");
  container.replaceChildren(el("form", { onsubmit: send }, ...cards, button));
}

// Arguments are JSON once they are complete.
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
