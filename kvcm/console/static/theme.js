// Before anything is painted: the colours that this browser was told to use.
(() => {
  const kept = localStorage.getItem("kvcm-theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
})();
