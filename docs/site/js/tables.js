"use strict";
// Wide tables scroll: let users without a mouse do that, too. The theme wraps tables when a page is shown.
new MutationObserver(() => {
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) wrap.tabIndex = 0;
}).observe(document.body, { childList: true, subtree: true });
