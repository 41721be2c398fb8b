// The libraries that not every conversation needs: each is loaded when it is first used.

// Calls a function with the library, immediately if it is loaded. If it cannot be loaded, code and
// formulas remain plain text.
function lazily(load) {
  let library = null;
  let loading = null;
  return (use) => {
    if (library) {
      use(library);
      return;
    }
    loading ??= load().then(
      (loaded) => (library = loaded),
      () => (loading = null),
    );
    loading.then((loaded) => loaded && use(loaded));
  };
}

/** highlight.js. */
export const codeColours = lazily(async () => (await import("./vendor/highlight.min.js")).default);

/** A promise of PDF.js, which reads in a worker of its own. */
export async function pdf() {
  const library = await import("./vendor/pdf.min.mjs");
  library.GlobalWorkerOptions.workerSrc = new URL("page/vendor/pdf.worker.min.mjs", document.baseURI).href;
  return library;
}

/** A function that typesets LaTeX: `typeset(element, tex, display)`. */
export const formulas = lazily(async () => {
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = "page/vendor/katex.min.css";
  document.head.append(style);
  await import("./vendor/katex.min.js");
  return typeset;
});

function typeset(element, tex, displayMode) {
  let tree;
  try {
    tree = katex.__renderToDomTree(tex, { displayMode, throwOnError: true, strict: "ignore", maxExpand: 500, maxSize: 20 });
  } catch {
    return; // text that is not LaTeX stays unchanged
  }
  allowStyles(tree);
  element.replaceChildren(tree.toNode());
}

// The page's content security policy forbids style attributes, but not styles that a script sets.
function allowStyles(node) {
  if (node.attributes?.style) {
    const css = node.attributes.style;
    const made = node.toNode.bind(node);
    delete node.attributes.style;
    node.toNode = () => {
      const element = made();
      element.style.cssText = css;
      return element;
    };
  }
  for (const child of node.children ?? []) allowStyles(child);
}
