// The list of conversations: at the side, or above the page where that is narrow.

import { el, iconButton } from "./dom.js";

const element = (id) => document.getElementById(id);

export class Sidebar {
  #conversations;
  #act;

  /** `act`: {show(conversation), begin()}. */
  constructor(conversations, act) {
    this.#conversations = conversations;
    this.#act = act;
    element("new").addEventListener("click", () => {
      this.close();
      act.begin();
    });
    element("forget").addEventListener("click", () => {
      if (!confirm("Delete all conversations from this browser?")) return;
      conversations.removeAll();
      act.begin();
    });
    element("open-sidebar").addEventListener("click", () => this.#open());
    element("close-sidebar").addEventListener("click", () => this.close());
    element("veil").addEventListener("click", () => this.close());
  }

  /** Show the list as it is now, with one of them as the current one. */
  update(current) {
    const entries = this.#conversations.all.map((one) =>
      el(
        "li",
        {},
        el(
          "button",
          {
            type: "button",
            className: "entry",
            "aria-current": one === current ? "true" : undefined,
            title: one.title,
            onclick: () => {
              this.close();
              this.#act.show(one);
            },
          },
          one.title,
        ),
        iconButton("bin", `Delete “${one.title}”`, () => {
          this.#conversations.remove(one);
          if (one === current) this.#act.begin();
          else this.update(current);
        }),
      ),
    );
    element("conversations").replaceChildren(...entries);
    element("forget").hidden = entries.length === 0;
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
