// Sets the chosen theme before anything is painted. Not a module, because those run later.

/** Use the stored theme, or the system's. */
function applyTheme() {
  document.documentElement.dataset.theme = localStorage.getItem("theme") ?? "";
}

applyTheme();
