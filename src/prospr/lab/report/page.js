"use strict";
(() => {
  const all = (root, selector) => [...root.querySelectorAll(selector)];

  /* The paper's numbers: shown or hidden. */
  const switches = (section) => {
    const row = section.querySelector(".switch"), box = row.querySelector("input");
    const show = () => section.classList.toggle("without-paper", !box.checked);
    row.hidden = false;
    box.addEventListener("change", show);
    show();
  };

  /* Training curves: show the runs of the methods and sparsities that are ticked. */
  const curves = (part) => {
    const chooser = part.querySelector(".chooser");
    const lines = all(part, "[data-method]");
    const ticked = (by) => new Set(all(chooser, `input[data-by=${by}]:checked`).map((box) => box.value));
    const show = () => {
      const methods = ticked("method"), sparsities = ticked("sparsity");
      const shown = new Set();
      for (const line of lines) {
        const { method, sparsity, run } = line.dataset;
        const on = methods.has(method) && (sparsity === undefined || sparsities.has(sparsity));
        line.classList.toggle("off", !on);
        if (on) shown.add(run);
      }
      const runs = new Set(lines.map((line) => line.dataset.run));
      chooser.querySelector("output").textContent = `${shown.size} of ${runs.size} runs`;
    };
    chooser.hidden = false;
    chooser.addEventListener("change", show);
    show();
  };

  /* Every run: show the rows that have all that stands between the commas of the box; Escape empties it. */
  const filtered = (part) => {
    const box = part.querySelector("input"), told = part.querySelector("output");
    const text = (row) => [...row.cells].map((cell) => cell.textContent.toLowerCase()).join("\n");
    const rows = all(part, "tbody tr").map((row) => [row, text(row)]);
    const show = () => {
      const wanted = box.value.toLowerCase().split(",").map((one) => one.trim());
      let shown = 0;
      for (const [row, text] of rows) {
        row.hidden = !wanted.every((one) => text.includes(one));
        shown += !row.hidden;
      }
      told.textContent = `${shown} of ${rows.length} runs`;
    };
    part.querySelector(".filter").hidden = false;
    box.addEventListener("input", show);
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { box.value = ""; show(); }
    });
    show();
  };

  const begin = () => {
    all(document, "section:has(> figure > .switch)").forEach(switches);
    all(document, ".curves").forEach(curves);
    all(document, ".filtered").forEach(filtered);
  };
  addEventListener("renewed", begin);
  begin();
})();
