// The message field: text, and images that were dropped, pasted or chosen.

import { el, icon } from "./dom.js";
import { dataUri, imageFiles } from "./images.js";

const TALLEST = 220; // pixels; CSS has the same figure
const MOST_IMAGES = 8;

const element = (id) => document.getElementById(id);

export class Composer {
  #images = [];
  #field = element("prompt");
  #act;

  /** `act`: {send(text, images), stop(), tell(sentence)}. */
  constructor(act) {
    this.#act = act;
    element("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#field.addEventListener("input", () => this.#fit());
    this.#field.addEventListener("keydown", (event) => {
      // On a phone the return key starts a line, and there is a button to send.
      const typed = event.key === "Enter" && !event.shiftKey && !event.isComposing;
      if (typed && !matchMedia("(pointer: coarse) and (hover: none)").matches) {
        event.preventDefault();
        this.#send();
      }
    });
    this.#field.addEventListener("paste", (event) => {
      const files = imageFiles(event.clipboardData.files);
      if (files.length) {
        event.preventDefault();
        this.#attach(files);
      }
    });
    element("stop").addEventListener("click", () => act.stop());
    element("attach").addEventListener("click", () => element("files").click());
    element("files").addEventListener("change", (event) => {
      this.#attach(imageFiles(event.target.files));
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

  #send() {
    const text = this.#field.value.trim();
    if (!text && !this.#images.length) return;
    const images = this.#images;
    this.#images = [];
    this.#field.value = "";
    this.#fit();
    this.#showImages();
    this.#act.send(text, images);
  }

  // Only as tall as what is written, up to a bound.
  #fit() {
    this.#field.style.height = "auto";
    this.#field.style.height = `${Math.min(this.#field.scrollHeight, TALLEST)}px`;
  }

  async #attach(files) {
    for (const file of files) {
      if (this.#images.length === MOST_IMAGES) {
        this.#act.tell(`A message holds at most ${MOST_IMAGES} images.`);
        return;
      }
      try {
        this.#images.push(await dataUri(file));
        this.#showImages();
      } catch (error) {
        this.#act.tell(error.message);
      }
    }
    this.#field.focus();
  }

  #showImages() {
    const shown = this.#images.map((url, index) =>
      el(
        "div",
        { className: "attachment", role: "listitem" },
        el("img", { src: url, alt: `Image ${index + 1}`, className: "thumb" }),
        el(
          "button",
          { type: "button", "aria-label": `Remove image ${index + 1}`, onclick: () => this.#remove(url) },
          icon("close"),
        ),
      ),
    );
    element("attached").replaceChildren(...shown);
  }

  #remove(url) {
    this.#images.splice(this.#images.indexOf(url), 1);
    this.#showImages();
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
      const files = imageFiles(event.dataTransfer.files);
      if (!files.length) this.#act.tell("Only images can be attached.");
      this.#attach(files);
    });
  }
}
