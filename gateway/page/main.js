// The page: one conversation is shown, at most one answer is being written.

import { begun, Reader } from "./answer.js";
import { ApiFailure, chat, read } from "./api.js";
import { Composer } from "./composer.js";
import { Conversations } from "./conversations.js";
import * as modelList from "./models.js";
import { requestOf } from "./request.js";
import * as settings from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as status from "./status.js";
import * as threads from "./thread.js";
import { answerView, questionView } from "./transcript.js";

const FOLLOW = 80; // pixels from the end within which the text is followed
const PAUSE = 3; // times as long as showing what has come took, the browser is left alone after it

const element = (id) => document.getElementById(id);
const scroller = element("scroller");
const transcript = element("transcript");
const models = element("model");
const notice = element("notice");

const conversations = new Conversations(tell);
await conversations.read();
let shown = begin();
let cards = {}; // of each model by its name, as /v1/models describes it
let contextSize = null; // of the chosen model in tokens; null: not known
let running = null; // {message, view, abort, conversation}
let following = true;

const composer = new Composer({ send, stop, tell });
const sidebar = new Sidebar(conversations, { show, begin: () => show(begin()), tell });
const actions = { resend, retry, results, answerCalls, versions, choose };

function begin() {
  return conversations.begin(settings.initial());
}

function tell(sentence) {
  notice.textContent = sentence;
}

// ---- what is shown

function show(conversation) {
  shown = conversation;
  if (running) running.view = null;
  transcript.replaceChildren();
  const messages = threads.thread(shown);
  const views = new Map(messages.map((message) => [message, append(message)]));
  element("welcome").hidden = messages.length > 0;
  chooseModel();
  showContext();
  sidebar.update(shown);
  tell("");
  following = true;
  follow();
  composer.focus();
  return views;
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

/** How much of the model's context the conversation takes, as of the last answer that tells. */
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

// ---- what is asked

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

/** Ask something else in the place of a question, which stays as an earlier version. */
async function resend(message, content) {
  await stop();
  threads.cut(shown, message);
  show(shown);
  await send(content, message.images, message.files);
}

/** Have another answer written; this one stays as an earlier version. */
async function retry(message) {
  await stop();
  threads.cut(shown, message);
  show(shown);
  await answer();
}

function versions(message) {
  return threads.versions(shown, message);
}

/** Show another version of a message, with the messages after it, in place of the last one. */
function choose(message) {
  const { scrollTop } = scroller;
  const { title } = document.activeElement;
  threads.choose(shown, message);
  const { element: there } = show(shown).get(message);
  following = false;
  scroller.scrollTop = scrollTop;
  const button = [`[title="${title}"]:enabled`, ".version ~ button:enabled", "button:has(+ .version):enabled"];
  button.map((one) => there.querySelector(one)).find(Boolean)?.focus();
  conversations.change(shown);
}

/** The answers of the tools that a message called, in the order of its calls. */
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

async function answer() {
  const conversation = shown;
  const message = begun();
  const asked = threads.thread(conversation);
  const abort = new AbortController();
  const ended = Promise.withResolvers();
  running = { message, view: null, abort, conversation, ended: ended.promise };
  add(message);
  conversations.keep(conversation);
  sidebar.update(shown);
  composer.running(true);
  tell("");
  follow();
  status.look();
  await written(message, () => requestOf(asked, conversation.settings, models.value), abort.signal);
  const { view } = running;
  running = null;
  view?.update();
  // It may have been deleted meanwhile.
  if (conversations.all.includes(conversation)) conversations.keep(conversation);
  sidebar.update(shown);
  showContext();
  composer.running(false);
  follow();
  status.look();
  ended.resolve();
}

async function written(message, request, signal) {
  const reader = new Reader(message);
  let painting = 0;
  let free = 0; // the time from which the browser may be kept busy again
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
  if (error.status === 401) settings.open("key");
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
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (running) stop();
    else sidebar.close();
  }
});

// The words that were on their way belong to the conversation too.
window.addEventListener("pagehide", () => running && conversations.keep(running.conversation));

for (const button of element("examples").querySelectorAll("button")) {
  button.addEventListener("click", () => send(button.textContent, [], []));
}

// ---- which models there are

async function readModels() {
  try {
    const { data } = await read("v1/models", settings.apiKey());
    cards = Object.fromEntries(data.map((model) => [model.id, model]));
    const names = data.map((model) => model.id);
    models.replaceChildren(...names.map((name) => new Option(name)));
    chooseModel();
    tell(names.length ? "" : "There is no model yet: put a YAML file into the models folder.");
  } catch (error) {
    if (error.status === 401) settings.open("key");
    tell(error.message);
  }
  status.look();
}

/** The model that a conversation was led with, where it is still there. */
function chooseModel() {
  const wanted = shown.settings.model;
  if ([...models.options].some(({ value }) => value === wanted)) models.value = wanted;
  settings.showDefaults(cards[models.value]?.meta.defaults);
  status.look();
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
modelList.wire({ key: settings.apiKey, look: status.look });
status.watch({
  model: () => cards[models.value]?.meta.alias_of ?? models.value,
  key: settings.apiKey,
  running: () => running !== null,
  seen: (all, chosen) => {
    modelList.update(all);
    contextSize = chosen?.context_size ?? null;
    showContext();
  },
});
show(shown);
readModels();
