// Sets the chosen theme before anything is painted. Not a module, because those run later.

/** Use this theme; "" is the system's. */
function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

try {
  applyTheme(localStorage.getItem("theme") ?? "");
} catch {
  applyTheme(""); // this browser blocks storage
}
