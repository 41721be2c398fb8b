// The message field: text, and files that were dropped, pasted or chosen.

import { el, icon } from "./dom.js";
import { attachment } from "./files.js";

const TALLEST = 220; // pixels; page.css has the same number
const MOST_FILES = 8;

const element = (id) => document.getElementById(id);

export class Composer {
  #attached = []; // results of `attachment`
  #reading = Promise.resolve(); // resolves when all chosen files have been read
  #field = element("prompt");
  #act;

  /**
   * `act`: {send(text, images, files), stop(), refusal(), notify(sentence)}. `refusal()`: why the model
   * accepts no images; "" if it does.
   */
  constructor(act) {
    this.#act = act;
    element("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#field.addEventListener("input", () => this.#fit());
    this.#field.addEventListener("keydown", (event) => {
      // On a phone the return key inserts a line break, and a button sends.
      const typed = event.key === "Enter" && !event.shiftKey && !event.isComposing;
      if (typed && !matchMedia("(pointer: coarse) and (hover: none)").matches) {
        event.preventDefault();
        this.#send();
      }
    });
    this.#field.addEventListener("paste", (event) => {
      const { files } = event.clipboardData;
      if (files.length) {
        event.preventDefault();
        this.#attach(files);
      }
    });
    element("stop").addEventListener("click", () => act.stop());
    element("attach").addEventListener("click", () => element("files").click());
    element("files").addEventListener("change", (event) => {
      this.#attach(event.target.files);
      event.target.value = "";
    });
    this.#takeDrops();
  }

  focus() {
    // On a phone the keyboard would cover the answer.
    if (matchMedia("(hover: hover)").matches) this.#field.focus();
  }

  running(is) {
    const hadFocus = document.activeElement === element("send") || document.activeElement === element("stop");
    element("send").hidden = is;
    element("stop").hidden = !is;
    if (hadFocus) this.#field.focus();
  }

  async #send() {
    await this.#reading;
    const text = this.#field.value.trim();
    if (!text && !this.#attached.length) return;
    const attached = this.#attached;
    const images = attached.map(({ image }) => image).filter(Boolean);
    // Another model may have been chosen since.
    if (images.length && this.#act.refusal()) {
      this.#act.notify(`${this.#act.refusal()} Remove the image, or choose another model.`);
      return;
    }
    this.#attached = [];
    this.#field.value = "";
    this.#fit();
    this.#showAttached();
    this.#act.send(text, images, attached.map(({ file }) => file).filter(Boolean));
  }

  // The field is as tall as its text, up to TALLEST.
  #fit() {
    this.#field.style.height = "auto";
    this.#field.style.height = `${Math.min(this.#field.scrollHeight, TALLEST)}px`;
  }

  #attach(files) {
    const given = [...files];
    this.#reading = this.#reading.then(() => this.#read(given));
  }

  async #read(files) {
    this.#act.notify("");
    for (const file of files) {
      if (this.#attached.length === MOST_FILES) {
        this.#act.notify(`A message can have at most ${MOST_FILES} files.`);
        break;
      }
      try {
        const one = await attachment(file);
        if (one.image && this.#act.refusal()) throw new Error(`${this.#act.refusal()} The image was not attached.`);
        this.#attached.push(one);
        this.#showAttached();
      } catch (error) {
        this.#act.notify(error.message);
      }
    }
    this.#field.focus();
  }

  #showAttached() {
    const shown = this.#attached.map((one, index) => {
      const name = one.file?.name ?? `image ${index + 1}`;
      return el(
        "div",
        { className: "attachment", role: "listitem" },
        one.file ? el("p", { className: "chip", title: name }, icon("file"), el("span", {}, name)) : el("img", { src: one.image, alt: name, className: "thumb" }),
        el("button", { type: "button", "aria-label": `Remove ${name}`, onclick: () => this.#remove(one) }, icon("close")),
      );
    });
    element("attached").replaceChildren(...shown);
  }

  #remove(one) {
    this.#attached.splice(this.#attached.indexOf(one), 1);
    this.#showAttached();
    this.#field.focus();
  }

  #takeDrops() {
    const veil = element("drop");
    const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
    addEventListener("dragover", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      veil.hidden = false;
    });
    addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) veil.hidden = true;
    });
    addEventListener("drop", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      veil.hidden = true;
      this.#attach(event.dataTransfer.files);
    });
  }
}
