"use strict";
/* A page that is served asks its server whether the runs have changed, and takes the new page into the old one: what is
   typed, ticked, unfolded, scrolled to and focused stays so. */
(() => {
  const EVERY = 2000;
  const all = (selector) => [...document.querySelectorAll(selector)];
  const root = document.documentElement, told = document.querySelector(".live");
  let stamp = root.dataset.live;

  /* Elements by a name that outlives the exchange: their section, their row, and what tells them from their siblings. */
  const KEPT = "input, details, summary, .scroll";
  const named = () => {
    const found = new Map(), count = {};
    for (const one of all(KEPT)) {
      const section = one.closest("section")?.getAttribute("aria-labelledby");
      const row = one.closest("tr")?.querySelector("th")?.textContent;
      const own = one.matches("input") ? [one.type, one.dataset.by, one.type === "checkbox" ? one.value : ""] : [];
      const name = [section, row, one.tagName, ...own].join("|");
      count[name] = (count[name] ?? 0) + 1;
      found.set(`${name}|${count[name]}`, one);
    }
    return found;
  };
  const state = () => new Map([...named()].map(([name, one]) => [name, {
    value: one.value, checked: one.checked, open: one.open, left: one.scrollLeft, top: one.scrollTop,
    focused: one === document.activeElement, cursor: one.type === "search" ? one.selectionStart : null,
  }]));
  const restore = (before) => {
    for (const [name, one] of named()) {
      const was = before.get(name);
      if (was === undefined) continue;
      if (one.matches("input[type=checkbox]")) one.checked = was.checked;
      else if (one.matches("input")) one.value = was.value;
      if (one.matches("details")) one.open = was.open;
    }
  };
  const settle = (before) => {  /* what only works on elements that are shown */
    for (const [name, one] of named()) {
      const was = before.get(name);
      if (was === undefined) continue;
      if (one.matches(".scroll")) { one.scrollLeft = was.left; one.scrollTop = was.top; }
      if (was.focused) {
        one.focus({ preventScroll: true });
        if (was.cursor !== null) one.setSelectionRange(was.cursor, was.cursor);
      }
    }
  };

  /* The section that is being read, and how far down the window it begins. */
  const reading = () => {
    const one = scrollY > 0 && all("section, article > h2").find((one) => one.getBoundingClientRect().bottom > 0);
    return one ? [one.getAttribute("aria-labelledby") ?? one.id, one.getBoundingClientRect().top] : null;
  };
  const back = (place) => {
    const one = place && document.getElementById(place[0]);
    if (one) scrollBy({ top: (one.closest("section") ?? one).getBoundingClientRect().top - place[1], behavior: "instant" });
  };

  const renew = async () => {
    const answer = await fetch("./", { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const before = state(), place = reading();
    for (const part of ["header", "main"]) {
      const now = page.querySelector(`body > ${part}`), old = document.querySelector(`body > ${part}`);
      if (now && old) old.replaceWith(document.adoptNode(now));
    }
    document.title = page.title;
    stamp = page.documentElement.dataset.live;
    restore(before);
    dispatchEvent(new Event("renewed"));
    settle(before);
    back(place);
  };

  const say = (text) => { if (told.textContent !== text) told.textContent = text; };
  const look = async () => {
    try {
      if (!document.hidden) {
        const answer = await fetch("state", { cache: "no-store" });
        if ((await answer.text()) !== stamp) await renew();
        say("live");
      }
    } catch {
      say("the server does not answer; this is the page as it was");
    }
    setTimeout(look, EVERY);
  };
  look();
})();
