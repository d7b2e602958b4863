// What pages need beside htmx: the switch of colours, and live regions that rest while nobody looks.
(() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const isDark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => (button.textContent = isDark() ? "Light" : "Dark");
  if (button) {
    button.hidden = false;
    name();
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      localStorage.setItem("kvcm-theme", root.dataset.theme);
      name();
    });
  }
  document.addEventListener("htmx:before:request", (event) => {
    if (document.hidden) event.preventDefault();
  });
  const tell = (isStale) => (document.getElementById("stale").hidden = !isStale);
  document.addEventListener("htmx:after:request", (event) => {
    const { response, sourceElement, text } = event.detail.ctx;
    const isFresh = response.status < 400 && text.includes(`id="${sourceElement.id}" data-live`);
    if (!isFresh) event.preventDefault();  // what was seen last is more than nothing
    tell(!isFresh);
  });
  document.addEventListener("htmx:error", () => tell(true));
  document.addEventListener("click", (event) => {
    const source = event.target.closest("[data-copy]");
    if (!source) return;
    const text = document.getElementById(source.dataset.copy);
    if (navigator.clipboard) navigator.clipboard.writeText(text.textContent.trim())
      .then(() => (source.textContent = "Copied"));
    else {  // in plain HTTP: for the person to copy
      getSelection().selectAllChildren(text);
      source.textContent = "Selected";
    }
  });
})();
