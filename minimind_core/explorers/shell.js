// The browser's side of an explorer: native controls, one <img>, one sentence. See shell.py for the messages.

const WAIT = 3000; // ms without an answer before the reader is told
const NO_ANSWER = "No answer from the kernel. If it was restarted, run this cell again.";

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function render({ model, el }) {
  const spec = model.get("spec");
  const prefix = "mm" + Math.random().toString(36).slice(2);
  let pending = null; // changes not sent yet
  let waiting = null; // timer while a change is under way

  const picture = element("img", { width: spec.size[0], height: spec.size[1] });
  const sentence = element("p", { className: "mm-sentence" });
  const error = element("p", { className: "mm-error", hidden: true });
  const remark = element("p", { className: "mm-remark" });
  error.setAttribute("role", "alert");
  remark.setAttribute("role", "status");

  function send() {
    if (pending === null || waiting !== null) return;
    const message = pending;
    pending = null;
    waiting = setTimeout(() => (remark.textContent = NO_ANSWER), WAIT);
    root.dataset.busy = "";
    try {
      model.send(message);
    } catch {
      clearTimeout(waiting); // the kernel that this explorer belongs to is gone
      waiting = null;
      remark.textContent = NO_ANSWER;
    }
  }

  function change(name, raw) {
    pending ??= { set: {} };
    pending.set[name] = raw;
    send();
  }

  function press(request) {
    pending = { ...request, set: {} }; // a preset or a reset overtakes what was not sent yet
    send();
  }

  function button(text, request) {
    const node = element("button", { type: "button", textContent: text });
    node.addEventListener("click", () => press(request));
    return node;
  }

  const presets = spec.presets.map((name) => [name, button(name, { preset: name })]);
  const presetRow = element("div", { className: "mm-presets" }, ...presets.map(([, node]) => node), button("Reset", { reset: true }));
  presetRow.setAttribute("role", "group");
  presetRow.setAttribute("aria-label", "Presets");

  // Work under way: how much is done, and one button that stops it or does it again.
  const progress = element("progress", { max: 1 });
  progress.setAttribute("aria-label", "done");
  const doButton = element("button", { type: "button" });
  doButton.addEventListener("click", () => {
    if (doButton.textContent === "Stop") {
      pending = null;
      model.send({ stop: true });
    } else {
      press({});
    }
  });
  const workRow = element("div", { className: "mm-work", hidden: !spec.works }, progress, doButton);

  // Each control gives a row of the page and a function that shows a value.
  const makers = {
    slider(control, id) {
      const slider = element("input", { type: "range", id, min: 0, max: control.last, step: 1 });
      const box = element("input", { type: "text", inputMode: "decimal", autocomplete: "off", spellcheck: false });
      box.setAttribute("aria-label", control.label + ", number");
      let edited = false; // typed, but not yet sent: must not be overwritten
      slider.addEventListener("input", () => change(control.name, Number(slider.value)));
      box.addEventListener("input", () => (edited = true));
      const commit = () => {
        if (edited) change(control.name, box.value);
        edited = false;
      };
      box.addEventListener("blur", commit);
      box.addEventListener("keydown", (event) => event.key === "Enter" && commit());
      const show = (value) => {
        slider.value = value.index;
        slider.setAttribute("aria-valuetext", value.spoken);
        if (!edited) box.value = value.text;
      };
      return { nodes: [slider, box], show };
    },
    choice(control, id) {
      const list = element("select", { id }, ...control.options.map((option) => element("option", { textContent: option })));
      list.addEventListener("change", () => change(control.name, list.selectedIndex));
      return { nodes: [list], show: (value) => (list.selectedIndex = value.index) };
    },
    text(control, id) {
      const box = element("input", { type: "text", id, className: "mm-text", autocomplete: "off", spellcheck: false });
      box.addEventListener("input", () => change(control.name, box.value)); // each letter moves the picture
      box.addEventListener("blur", () => show());
      const own = (value) => document.activeElement !== box && (box.value = value.text); // not under the typing hand
      return { nodes: [box], show: own };
    },
    toggle(control, id) {
      const box = element("input", { type: "checkbox", id });
      box.addEventListener("change", () => change(control.name, box.checked));
      return { nodes: [box], show: (value) => (box.checked = value.checked) };
    },
  };
  const rows = [];
  const shows = {};
  for (const control of spec.controls) {
    const id = `${prefix}-${control.name}`;
    const { nodes, show } = makers[control.kind](control, id);
    const row = element("div", { className: "mm-control" }, element("label", { htmlFor: id, textContent: control.label }), ...nodes);
    row.dataset.name = control.name;
    rows.push(row);
    shows[control.name] = show;
  }

  function answered() {
    clearTimeout(waiting);
    waiting = null;
    delete root.dataset.busy;
    show();
    send();
  }

  function show() {
    const shown = model.get("shown");
    for (const [name, value] of Object.entries(shown.controls)) {
      if (!(pending && (name in pending.set || pending.preset || pending.reset))) shows[name](value);
    }
    for (const [name, node] of presets) node.setAttribute("aria-pressed", shown.preset.includes(name));
    picture.src = shown.picture; // a data URL: no frame is ever blank, unlike with a blob
    picture.alt = shown.sentence;
    sentence.textContent = shown.sentence;
    sentence.hidden = Boolean(shown.error);
    error.textContent = shown.error;
    error.hidden = !shown.error;
    root.classList.toggle("mm-failed", Boolean(shown.error));
    remark.textContent = shown.remark;
    progress.value = shown.done;
    doButton.textContent = shown.working ? "Stop" : spec.again;
    sentence.setAttribute("aria-live", shown.working ? "off" : "polite"); // not four times a second
    root.dataset.done = shown.done;
    root.dataset.serial = shown.serial;
  }

  const root = element(
    "div",
    { className: "mm-explorer" },
    ...(rows.length ? [presetRow, element("div", { className: "mm-controls" }, ...rows)] : []),
    workRow,
    picture,
    element("div", { className: "mm-words" }, sentence, error),
    remark,
  );
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", `Explorer ${spec.name}`);
  for (const node of root.querySelectorAll("input, select, button")) {
    node.dataset.lmSuppressShortcuts = "true"; // keys move our controls, not JupyterLab's cells
  }
  root.addEventListener("keydown", (event) => {
    if (event.key === "Escape") el.closest("[tabindex]")?.focus(); // back to the notebook, where keys move cells
  });
  el.append(root);
  show();
  model.on("change:shown", answered);
  return () => {
    model.off("change:shown", answered);
    clearTimeout(waiting);
  };
}

export default { render };
