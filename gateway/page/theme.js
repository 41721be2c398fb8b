// The theme that was chosen, before anything is painted: this is no module, and so runs at once.

/** Paint in the theme that is kept, or in the system's. */
function applyTheme() {
  document.documentElement.dataset.theme = localStorage.getItem("theme") ?? "";
}

applyTheme();
