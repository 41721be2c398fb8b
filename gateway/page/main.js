// The page: shows one conversation, and generates at most one answer at a time.

import { begun, Reader } from "./answer.js";
import { ApiFailure, chat, read } from "./api.js";
import { Composer } from "./composer.js";
import { Conversations } from "./conversations.js";
import { el } from "./dom.js";
import * as modelList from "./models.js";
import * as picker from "./picker.js";
import { requestOf } from "./request.js";
import * as settings from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as status from "./status.js";
import * as threads from "./thread.js";
import { answerView, questionView } from "./transcript.js";

const FOLLOW = 80; // pixels from the end within which the view scrolls with the text
const PAUSE = 3; // rendering pauses for this multiple of the time that it took

const element = (id) => document.getElementById(id);
const scroller = element("scroller");
const transcript = element("transcript");
const models = element("model");
const notice = element("notice");

const conversations = new Conversations({ lost: notify, changed, removed });
await conversations.read();
let shown = addressed();
let cards = {}; // by model name, the items of /v1/models
let states = ""; // of all models, as of the last poll
let contextSize = null; // of the chosen model in tokens; null: not known
let running = null; // {message, view, abort, conversation, since: milliseconds, ended}
let following = true;

const composer = new Composer({ send, stop, refusal, notify });
const sidebar = new Sidebar(conversations, { show, begin: () => show(begin()), remove, notify });
const actions = { resend, retry, resume, rewrite, removeMessage, results, answerCalls, versions, choose };

function begin() {
  return conversations.begin(settings.initial());
}

/** The conversation of the page's address; a new one if there is none. */
function addressed() {
  return conversations.all.find(({ id }) => `#${id}` === location.hash) ?? begin();
}

/** Make the address that of the shown conversation. `change`: "pushState" or "replaceState". */
function address(change) {
  const hash = shown.messages.size ? `#${shown.id}` : "";
  if (location.hash !== hash) history[change](null, "", location.pathname + location.search + hash);
}

window.addEventListener("popstate", () => show(addressed(), "replaceState"));

/** Show a message below the message field. One that offers to undo something is not cleared by "". */
function notify(sentence, undo) {
  if (!sentence && notice.querySelector("button")) return;
  const act = () => {
    notice.replaceChildren();
    undo();
  };
  notice.replaceChildren(sentence, ...(undo ? [el("button", { type: "button", className: "quiet", onclick: act }, "Undo")] : []));
}

// ---- display

function show(conversation, change = "pushState") {
  shown = conversation;
  address(change);
  const views = render();
  chooseModel();
  notify("");
  following = true;
  follow();
  composer.focus();
  return views;
}

function render() {
  if (running) running.view = null;
  transcript.replaceChildren();
  const messages = threads.thread(shown);
  const views = new Map(messages.map((message) => [message, append(message)]));
  element("welcome").hidden = messages.length > 0;
  showContext();
  sidebar.update(shown);
  return views;
}

/** Show the conversation again, at the same position. */
function redraw() {
  const { scrollTop } = scroller;
  const views = render();
  following = false;
  scroller.scrollTop = scrollTop;
  return views;
}

/** A conversation was changed in another tab. */
function changed(conversation, messagesToo) {
  const writing = document.activeElement.closest("#transcript form");
  if (messagesToo && conversation === shown && !writing) following ? render() : redraw();
  else sidebar.update(shown);
}

/** A conversation was deleted in another tab. */
function removed(conversation) {
  if (running?.conversation === conversation) stop();
  if (conversation === shown) {
    show(begin(), "replaceState");
    notify("This conversation was deleted in another tab.");
  } else sidebar.update(shown);
}

/** Delete conversations; the notice offers to undo it. */
async function remove(gone) {
  if (gone.includes(running?.conversation)) await stop();
  const open = gone.includes(shown) ? shown : null;
  conversations.remove(gone);
  if (open) show(begin());
  else sidebar.update(shown);
  notify(gone.length === 1 ? `“${gone[0].title}” was deleted.` : `${gone.length} conversations were deleted.`, () => {
    conversations.restore(gone);
    if (open) show(open);
    else sidebar.update(shown);
  });
}

function append(message) {
  element("welcome").hidden = true;
  if (message.role === "tool") return null;
  const view = message.role === "user" ? questionView(message, actions) : answerView(message, actions);
  transcript.append(view.element);
  if (running?.message === message) running.view = view;
  return view;
}

function follow() {
  if (following) scroller.scrollTop = scroller.scrollHeight;
}

function looked() {
  following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < FOLLOW;
  element("to-end").hidden = following;
}

scroller.addEventListener("scroll", looked, { passive: true });
new ResizeObserver(() => {
  follow();
  looked();
}).observe(transcript);
element("to-end").addEventListener("click", () => {
  following = true;
  follow();
});

/** Show how much of the model's context the conversation uses, by the last answer with usage. */
function showContext() {
  const used = threads.thread(shown).findLast(({ facts }) => facts?.context)?.facts.context ?? 0;
  const number = (tokens) => tokens.toLocaleString("en");
  const meter = element("context-meter");
  element("context").hidden = !used;
  meter.hidden = !contextSize;
  meter.max = contextSize ?? 1;
  meter.high = 0.9 * meter.max;
  meter.value = used;
  element("context-text").textContent = contextSize ? `${number(used)} of ${number(contextSize)} tokens` : `${number(used)} tokens`;
}

// ---- requests

async function send(content, images, files) {
  await stop();
  following = true;
  add({ role: "user", content, images, files });
  await answer();
}

function add(message) {
  threads.add(shown, message);
  append(message);
}

/** Replace a question and send it; the old one stays as an earlier version. */
async function resend(message, content) {
  await stop();
  threads.cut(shown, message);
  show(shown);
  await send(content, message.images, message.files);
}

/** Request another answer; this one stays as an earlier version. */
async function retry(message) {
  await stop();
  threads.cut(shown, message);
  show(shown);
  await answer();
}

/** Let the model continue an answer, which replaces this one. */
async function resume(message) {
  await stop();
  threads.cut(shown, message);
  message.removed = true;
  redraw();
  following = true;
  await answer(message);
}

/** Replace the text of an answer; the old one stays as an earlier version. */
async function rewrite({ error: _, ...message }, content) {
  await stop();
  threads.cut(shown, message);
  threads.add(shown, { ...message, content, state: "done", facts: { edited: "yes" } });
  conversations.keep(shown);
  redraw();
}

/** Delete one message, with the results of its tools; the notice offers to undo it. */
async function removeMessage(message) {
  await stop();
  const conversation = shown;
  const { leaf } = conversation;
  const gone = [message, ...(message.calls ? results(message) : [])];
  threads.remove(conversation, gone);
  conversations.change(conversation);
  redraw();
  composer.focus();
  notify("The message was deleted.", () => {
    for (const one of gone) one.removed = false;
    conversation.leaf = leaf;
    conversations.change(conversation);
    if (conversation === shown) redraw();
  });
}

function versions(message) {
  return threads.versions(shown, message);
}

/** Show another version of a message, with the messages after it. */
function choose(message) {
  const { title } = document.activeElement;
  threads.choose(shown, message);
  const { element: there } = redraw().get(message);
  const button = [`[title="${title}"]:enabled`, ".version ~ button:enabled", "button:has(+ .version):enabled"];
  button.map((one) => there.querySelector(one)).find(Boolean)?.focus();
  conversations.change(shown);
}

/** The results of the tools that a message called, in the order of its calls. */
function results(message) {
  const messages = threads.thread(shown);
  const after = messages.slice(messages.indexOf(message) + 1);
  return message.calls.map(({ id }) => after.find((one) => one.role === "tool" && one.id === id)).filter(Boolean);
}

async function answerCalls(message, texts) {
  await stop();
  message.calls.forEach(({ id }, index) => threads.add(shown, { role: "tool", id, content: texts[index] }));
  show(shown);
  await answer();
}

/** Request an answer, or the continuation of one. */
async function answer(begin) {
  const conversation = shown;
  const message = begun(models.value, begin);
  const asked = threads.thread(conversation);
  const abort = new AbortController();
  const ended = Promise.withResolvers();
  running = { message, view: null, abort, conversation, since: performance.now(), ended: ended.promise };
  add(message);
  conversations.keep(conversation, message);
  address("replaceState");
  sidebar.update(shown);
  composer.running(true);
  notice.replaceChildren();
  follow();
  status.poll();
  await written(message, () => requestOf(asked, conversation.settings, message), abort.signal);
  const { view } = running;
  running = null;
  view?.update();
  // The conversation may have been deleted meanwhile.
  if (conversations.all.includes(conversation)) conversations.keep(conversation, message);
  sidebar.update(shown);
  showContext();
  composer.running(false);
  follow();
  status.poll();
  ended.resolve();
}

async function written(message, request, signal) {
  const reader = new Reader(message);
  let painting = 0;
  let free = 0; // the time from which rendering may continue
  const paint = (now) => {
    painting = 0;
    if (now < free) {
      painting = requestAnimationFrame(paint);
      return;
    }
    const start = performance.now();
    running?.view?.update();
    const end = performance.now();
    free = end + PAUSE * (end - start);
  };
  try {
    for await (const chunk of chat(request(), settings.apiKey(), signal)) {
      reader.add(chunk);
      painting ||= requestAnimationFrame(paint);
    }
    message.state = "done";
  } catch (error) {
    message.state = signal.aborted ? "stopped" : "failed";
    if (message.state === "failed") message.error = sentence(error);
  }
  cancelAnimationFrame(painting);
}

function sentence(error) {
  if (!(error instanceof ApiFailure)) return `The page could not read the answer: ${error.message}`;
  if (error.status === 401) askForKey(error);
  if (error.param?.includes("image_url")) {
    return `The image was refused: ${error.message.replaceAll(error.param, "the image")}`;
  }
  return error.message;
}

async function stop() {
  if (!running) return;
  running.abort.abort();
  await running.ended;
}

document.addEventListener("keydown", (event) => {
  const closes = document.querySelector("dialog[open]") || event.target === models || event.target.closest("option");
  if (event.key === "Escape" && !closes) {
    if (running) stop();
    else sidebar.close();
  }
});

// Text that has arrived but is not shown yet belongs to the conversation too.
window.addEventListener("pagehide", () => {
  if (!running) return;
  running.abort.abort();
  running.message.state = "stopped";
  conversations.keep(running.conversation, running.message);
});

for (const button of element("examples").querySelectorAll("button")) {
  button.addEventListener("click", () => send(button.textContent, [], []));
}

// A fragment in the address would be another conversation.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  element("prompt").focus();
});

// ---- the API key

const keyForm = element("key-form");

/** Show the field for the key, with the reason. */
function askForKey({ message }) {
  keyForm.hidden = false;
  keyForm.querySelector("label").textContent = message;
  keyForm.elements.key.focus();
  keyForm.elements.key.select(); // the next key replaces a wrong one
}

keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  settings.setApiKey(keyForm.elements.key.value);
  readModels();
});

// ---- models

async function readModels() {
  try {
    const { data } = await read("v1/models", settings.apiKey());
    cards = Object.fromEntries(data.map((model) => [model.id, model]));
    keyForm.hidden = true;
    const before = models.options.length;
    const chatting = picker.offer(data);
    chooseModel();
    if (!data.length) notify("There is no model yet: put a YAML file into the models folder.");
    else if (!chatting) notify("None of the models can chat.");
    else if (!before) notify("");
  } catch (error) {
    if (error.status === 401) askForKey(error);
    else notify(error.message);
  }
  status.poll();
}

/** Why the chosen model accepts no images; "" if it may. */
function refusal() {
  return cards[models.value]?.meta.text_only ? `${models.value} accepts only text.` : "";
}

/** Choose the model that a conversation used, if it still exists. */
function chooseModel() {
  picker.choose(shown.settings.model ?? threads.thread(shown).findLast(({ model }) => model)?.model);
  settings.showDefaults(cards[models.value]?.meta.defaults);
  status.poll();
}

function showWaiting(all) {
  const model = running && all.find(({ name }) => name === running.message.model);
  if (!model) return;
  const size = cards[model.name]?.meta.size_bytes;
  running.view?.wait(status.waiting(model, size ? picker.bytes(size) : "", (performance.now() - running.since) / 1000));
}

models.addEventListener("change", () => {
  shown.settings.model = models.value;
  conversations.change(shown);
  settings.setInitial({ model: models.value });
  chooseModel();
});
settings.wire({
  shown: () => shown.settings,
  changed: () => conversations.change(shown),
  closed: (keyChanged) => keyChanged && readModels(),
});
modelList.wire({ key: settings.apiKey, poll: status.poll });
status.watch({
  model: () => models.value,
  key: settings.apiKey,
  running: () => running !== null,
  seen: (all, chosen) => {
    modelList.update(all, cards);
    showWaiting(all);
    // A download or a load shows more of a model, and a failed one is no longer preselected.
    const now = all.map(({ name, state }) => `${name} ${state}`).join("\n");
    if (states && now !== states) readModels();
    states = now;
    contextSize = chosen?.context_size ?? null;
    showContext();
  },
});
show(shown, "replaceState");
readModels();
