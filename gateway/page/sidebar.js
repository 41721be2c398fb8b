// The list of conversations: at the side, or over a narrow page.

import { el, iconButton } from "./dom.js";
import { exported, imported } from "./transfer.js";

const PRODUCT = document.title;

const element = (id) => document.getElementById(id);

export class Sidebar {
  #conversations;
  #act;
  #current = null;

  /** `act`: {show(conversation), begin(), remove(conversations), notify(sentence)}. */
  constructor(conversations, act) {
    this.#conversations = conversations;
    this.#act = act;
    element("new").addEventListener("click", () => {
      this.close();
      act.begin();
    });
    element("forget").addEventListener("click", () => {
      if (confirm("Delete all conversations from this browser?")) this.#remove(conversations.all);
    });
    element("search").addEventListener("input", () => this.update(this.#current));
    element("export").addEventListener("click", () => download(conversations.all, "conversations"));
    element("import").addEventListener("click", () => element("import-file").click());
    element("import-file").addEventListener("change", (event) => {
      this.#import(event.target.files[0]);
      event.target.value = "";
    });
    element("open-sidebar").addEventListener("click", () => this.#open());
    element("close-sidebar").addEventListener("click", () => this.close());
    element("veil").addEventListener("click", () => this.close());
  }

  /** Show the list, with one conversation as the current one. */
  update(current) {
    this.#current = current;
    document.title = [current.title, PRODUCT].filter(Boolean).join(" · ");
    const { all } = this.#conversations;
    const found = this.#conversations.find(element("search").value);
    const nothing = all.length && !found.length ? [el("li", { className: "nothing" }, "Nothing found")] : [];
    element("conversations").replaceChildren(...found.map((one) => this.#entry(one)), ...nothing);
    for (const id of ["forget", "export"]) element(id).hidden = all.length === 0;
    if (this.#conversations.blocked) element("kept-note").textContent = "Not stored: this browser blocks storage";
  }

  #entry(one) {
    const open = () => {
      this.close();
      this.#act.show(one);
    };
    const current = one === this.#current ? "true" : undefined;
    const item = el(
      "li",
      {},
      el("button", { type: "button", className: "entry", "aria-current": current, title: one.title, onclick: open }, one.title),
      iconButton("edit", `Rename “${one.title}”`, () => this.#rename(one, item)),
      iconButton("save", `Export “${one.title}”`, () => download([one], one.title)),
      iconButton("bin", `Delete “${one.title}”`, () => this.#remove([one])),
    );
    return item;
  }

  // On a narrow page the list would cover the offer to undo it.
  #remove(conversations) {
    this.close();
    this.#act.remove(conversations);
  }

  #rename(one, item) {
    const field = el("input", { type: "text", value: one.title, "aria-label": "New title" });
    let ended = false;
    const end = (title) => {
      if (ended) return;
      ended = true;
      if (title !== null) this.#conversations.rename(one, title);
      const place = [...element("conversations").children].indexOf(item);
      this.update(this.#current);
      element("conversations").children[place]?.querySelector("button").focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
      end(event.key === "Enter" ? field.value : null);
    });
    field.addEventListener("blur", () => end(field.value));
    item.replaceChildren(field);
    field.select();
  }

  async #import(file) {
    try {
      const added = await this.#conversations.take(imported(await file.text()));
      this.#act.notify(`${added} conversation${added === 1 ? "" : "s"} imported.`);
    } catch (error) {
      this.#act.notify(error.message);
    }
    this.update(this.#current);
  }

  #open() {
    document.body.classList.add("sidebar-open");
    element("open-sidebar").setAttribute("aria-expanded", "true");
    element("veil").hidden = false;
    element("new").focus();
  }

  close() {
    if (!document.body.classList.contains("sidebar-open")) return;
    document.body.classList.remove("sidebar-open");
    element("open-sidebar").setAttribute("aria-expanded", "false");
    element("veil").hidden = true;
    element("open-sidebar").focus();
  }
}

function download(conversations, name) {
  const url = URL.createObjectURL(new Blob([exported(conversations)], { type: "application/json" }));
  el("a", { href: url, download: `${name.replace(/[^\p{L}\p{N} _-]+/gu, "").trim() || "conversation"}.json` }).click();
  // The browser reads the address once the click has been handled.
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
