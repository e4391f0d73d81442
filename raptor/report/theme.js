"use strict";
// Before anything is painted: the theme that was chosen last, else the system's.

function remembered() {
  try { return localStorage.getItem("raptor-theme"); } catch { return null; } // not every browser stores for files
}

const systemDark = matchMedia("(prefers-color-scheme: dark)");
document.documentElement.dataset.theme = remembered() || (systemDark.matches ? "dark" : "light");
