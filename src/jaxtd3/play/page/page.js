// The panel, the keys, and the stream of frames.

const $ = (id) => document.getElementById(id);
const token = new URLSearchParams(location.search).get("token");
const address = (path) => path + (token ? `?token=${encodeURIComponent(token)}` : "");
const AXES = ["forward", "left", "turn"], UNITS = ["m/s", "m/s", "rad/s"];
const NUDGE = 0.1;
const KEYS = [  // [keys, what they do, what the robot must have]
  ["W S", "faster forward, back", "command"], ["A D", "to the left, right", "command"],
  ["Q E", "turn left, right", "command"], ["X", "stop", "command"], ["P", "push", "base"],
  ["R", "reset"], ["space", "pause"], ["F", "the camera follows"], ["drag", "look around"],
  ["wheel", "nearer, farther"], ["H", "these keys"],
];
const STEERING = { w: [0, 1], s: [0, -1], a: [1, 1], d: [1, -1], q: [2, 1], e: [2, -1] };

let about = null, frame = null, before = null, frameAt = 0, beforeAt = 0;
let command = [], sliders = [], sending = false, unsent = null;
const look = { angle: 2.4, tilt: 0.22, away: 3, follow: true, target: null };
window.played = { frames: 0, fps: 0 };  // read by tests

async function ask(what) {
  const reply = await fetch(address("/control"), {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(what),
  });
  const said = await reply.json();
  if (said.error) notice(said.error, 4000);
  return said;
}

function notice(text, ms) {
  $("notice").textContent = text;
  clearTimeout(notice.timer);
  if (ms) notice.timer = setTimeout(() => { $("notice").textContent = ""; }, ms);
}

// The newest command is sent once the one before it has arrived.
async function steer(next) {
  command = next.map((x, i) => Math.min(Math.max(x, about.ranges[i][0]), about.ranges[i][1]));
  showCommand();
  unsent = command;
  if (sending) return;
  sending = true;
  try {
    while (unsent) {
      const now = unsent;
      unsent = null;
      await ask({ command: now });
    }
  } finally {
    sending = false;
  }
}

function showCommand() {
  sliders.forEach(({ input, told, unit }, i) => {
    input.value = command[i];
    told.textContent = `${command[i].toFixed(2)} ${unit}`;
  });
}

function element(tag, className, parent) {
  const made = document.createElement(tag);
  made.className = className;
  parent.append(made);
  return made;
}

function build() {
  document.title = `${about.env} · jaxtd3 play`;
  $("env").textContent = about.env;
  $("agent").textContent = about.agent || "";
  $("steering").hidden = !about.ranges.length;
  $("push").hidden = $("strength-row").hidden = !about.floating;
  $("stop").hidden = !about.ranges.length;
  $("sliders").replaceChildren();
  sliders = about.ranges.map(([low, high], i) => {
    const row = element("label", "row", $("sliders"));
    element("span", "", row).textContent = AXES[i] || `part ${i + 1}`;
    const input = element("input", "command", row);
    Object.assign(input, { type: "range", min: low, max: high, step: 0.01, value: 0 });
    input.id = `command-${i}`;
    input.addEventListener("input", () => {
      steer(command.map((x, k) => (k === i ? Number(input.value) : x)));
    });
    return { input, told: element("output", "", row), unit: UNITS[i] || "" };
  });
  const has = { command: about.ranges.length, base: about.floating };
  $("keys").replaceChildren();
  for (const [keys, does, needs] of KEYS) {
    if (needs && !has[needs]) continue;
    const row = element("li", "", $("keys")), caps = element("span", "", row);
    for (const key of keys.split(" ")) element("kbd", "", caps).textContent = key;
    element("span", "", row).textContent = does;
  }
  $("keys").classList.toggle("folded", $("view").clientWidth < 560);
  const unweighted = about.terms.filter((_, i) => !about.weights[i]);
  $("unweighted").textContent = unweighted.length ? `weight 0: ${unweighted.join(", ")}` : "";
  $("terms").replaceChildren();
  about.most = 0.02;  // of the bars, one scale for all
  about.bars = about.terms.flatMap((name, i) => {
    if (!about.weights[i]) return [];
    const row = element("div", "term", $("terms"));
    Object.assign(element("span", "name", row), { textContent: name, title: name });
    const bar = element("i", "", element("div", "bar", row));
    return [{ i, row, bar, told: element("output", "", row) }];
  });
  $("observation").replaceChildren();
  about.parts = about.layout.map(([name, start, stop]) => {
    const part = element("div", "part", $("observation"));
    const line = element("div", "", part);
    element("span", "", line).textContent = `${name}  ${start}:${stop}`;
    const told = element("output", "", line);
    const canvas = element("canvas", "", part);
    canvas.width = 296;
    canvas.height = 22;
    return { name, start, stop, told, context: canvas.getContext("2d"), most: 0.5 };
  });
}

function showPanel() {
  $("seconds").textContent = `${frame.seconds.toFixed(1)} s`;
  $("falls").textContent = frame.falls;
  $("real-time").textContent = `${frame.real_time.toFixed(2)} ×`;
  $("fps").textContent = `${window.played.fps.toFixed(0)} /s`;
  $("reward").textContent = `${frame.reward.toFixed(2)} /s`;
  $("pause").setAttribute("aria-pressed", frame.paused);
  $("pause").textContent = frame.paused ? "Go on" : "Pause";
  $("speed-told").textContent = `${frame.speed.toFixed(2)} ×`;
  if (document.activeElement !== $("speed")) $("speed").value = frame.speed;
  if (frame.command && !sending && !document.activeElement.classList.contains("command")) {
    command = frame.command;
    showCommand();
  }
  about.most = Math.max(about.most * 0.998, 0.02, ...frame.terms.map(Math.abs));
  about.bars.forEach((bar) => {
    const x = frame.terms[bar.i], wide = 50 * Math.abs(x) / about.most;
    bar.bar.style.width = `${wide}%`;
    bar.bar.style.left = x < 0 ? `${50 - wide}%` : "50%";
    bar.bar.style.background = x < 0 ? "var(--bad)" : "var(--good)";
    bar.told.textContent = x.toFixed(2);
    bar.row.classList.toggle("idle", Math.abs(x) < 0.005);
  });
  for (const part of about.parts) {
    const values = frame.obs.slice(part.start, part.stop), c = part.context;
    const { width, height } = c.canvas, each = width / values.length;
    part.most = Math.max(part.most * 0.995, 0.2, ...values.map(Math.abs));
    c.clearRect(0, 0, width, height);
    c.fillStyle = "#2a323b";
    c.fillRect(0, height / 2, width, 1);
    values.forEach((x, k) => {
      const tall = x / part.most * (height / 2 - 1);
      c.fillStyle = x < 0 ? "#e0905f" : "#6aa9ff";
      c.fillRect(k * each + 0.5, height / 2 - Math.max(tall, 0), Math.max(each - 1, 1),
        Math.max(Math.abs(tall), 1));
    });
    part.told.textContent = values.length <= 3 ? values.map((x) => x.toFixed(2)).join("  ")
      : `±${part.most.toFixed(1)}`;
    if (part.name === "command") $("seen").textContent = part.told.textContent;
  }
}

// Between the last two frames, so that motion is even although they arrive unevenly.
function posesNow(now) {
  if (!before || frame.step !== before.step + 1) return frame.poses;
  const share = Math.min((now - frameAt) / Math.max(frameAt - beforeAt, 1), 1);
  const a = before.poses, b = frame.poses, out = new Array(b.length);
  for (let p = 0; p < b.length; p += 7) {
    const away = Math.hypot(b[p] - a[p], b[p + 1] - a[p + 1], b[p + 2] - a[p + 2]) > 0.5;
    let dot = 0;
    for (let k = 3; k < 7; k++) dot += a[p + k] * b[p + k];
    for (let k = 0; k < 7; k++) {
      const from = k > 2 && dot < 0 ? -a[p + k] : a[p + k];
      out[p + k] = away ? b[p + k] : from + (b[p + k] - from) * share;
    }
    const size = Math.hypot(out[p + 3], out[p + 4], out[p + 5], out[p + 6]);
    for (let k = 3; k < 7; k++) out[p + k] /= size;
  }
  return out;
}

function cameraFor(poses, scene, passed) {
  const root = scene.root ? poses.slice(7 * scene.root, 7 * scene.root + 3) : scene.centre;
  if (!look.target) {
    look.target = root.slice();
    look.away = scene.root ? 2.9 : 2.2 * scene.extent;
  }
  const far = Math.hypot(root[0] - look.target[0], root[1] - look.target[1]) > 1.5;
  if (look.follow) {
    const ease = far ? 1 : 1 - Math.exp(-passed / 150);
    for (let i = 0; i < 3; i++) look.target[i] += ease * (root[i] - look.target[i]);
  }
  const flat = look.away * Math.cos(look.tilt);
  return [look.target[0] + flat * Math.cos(look.angle),
    look.target[1] + flat * Math.sin(look.angle),
    Math.max(look.target[2] + look.away * Math.sin(look.tilt), 0.05)];
}

function bindButtons() {
  const toggleFollow = () => {
    look.follow = !look.follow;
    $("follow").setAttribute("aria-pressed", look.follow);
  };
  const actions = {
    stop: () => about.ranges.length && steer(command.map(() => 0)),
    push: () => about.floating && ask({ push: Number($("strength").value) }),
    reset: () => ask({ reset: true }),
    pause: () => ask({ pause: !frame.paused }),
    follow: toggleFollow,
    keys: () => $("keys").classList.toggle("folded"),
  };
  for (const [id, run] of Object.entries(actions)) {
    if (id !== "keys") $(id).addEventListener("click", () => { run(); $(id).blur(); });
  }
  $("strength").addEventListener("input", () => {
    $("strength-told").textContent = `${Number($("strength").value).toFixed(1)} m/s`;
  });
  $("speed").addEventListener("input", () => ask({ speed: Number($("speed").value) }));
  for (const input of document.querySelectorAll("input")) {
    input.addEventListener("change", () => input.blur());
  }
  const keys = { x: "stop", p: "push", r: "reset", " ": "pause", f: "follow", h: "keys" };
  addEventListener("keydown", (event) => {
    if (!about || !frame || event.ctrlKey || event.metaKey || event.altKey) return;
    const key = event.key.toLowerCase();
    if (key in STEERING && STEERING[key][0] < command.length) {
      const [part, sign] = STEERING[key];
      steer(command.map((x, i) => Math.round(100 * (x + sign * NUDGE * (i === part))) / 100));
    } else if (key in keys && !event.repeat) {
      actions[keys[key]]();
    } else {
      return;
    }
    event.preventDefault();
  });
  const canvas = $("view");
  canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
  canvas.addEventListener("pointermove", (event) => {
    if (!event.buttons) return;
    look.angle -= 0.008 * event.movementX;
    look.tilt = Math.min(Math.max(look.tilt + 0.006 * event.movementY, -0.25), 1.5);
  });
  canvas.addEventListener("wheel", (event) => {
    look.away = Math.min(Math.max(look.away * Math.exp(0.001 * event.deltaY), 0.4), 40);
    event.preventDefault();
  }, { passive: false });
}

async function main() {
  const reply = await fetch(address("/scene"));
  if (!reply.ok) throw new Error((await reply.json()).error);
  const scene = readScene(await reply.arrayBuffer());
  const draw = makeView($("view"), scene);
  const stream = new EventSource(address("/frames"));
  stream.addEventListener("about", (event) => {
    about = JSON.parse(event.data);
    command = about.ranges.map(() => 0);
    build();
    if (!main.bound) bindButtons();
    main.bound = true;
    notice("");
  });
  stream.addEventListener("frame", (event) => {
    const next = JSON.parse(event.data);
    if (!frame || next.step !== frame.step) {
      before = frame;
      beforeAt = frameAt;
      frameAt = performance.now();
    }
    frame = next;
  });
  stream.addEventListener("end", () => { stream.close(); notice("the program has ended"); });
  stream.onerror = () => { if (stream.readyState !== 2) notice("waiting for the program …"); };
  let drawn = 0, counted = performance.now(), panelAt = 0, drawnAt = counted, picture = "";
  const tick = (now) => {
    requestAnimationFrame(tick);
    if (!about || !frame) return;
    const poses = posesNow(now);
    const eye = cameraFor(poses, scene, now - drawnAt);
    drawnAt = now;
    const next = [poses, eye, look.target, $("view").clientWidth, $("view").clientHeight].join();
    if (next !== picture) draw(poses, eye, look.target);  // a still picture costs nothing
    picture = next;
    drawn += 1;
    window.played.frames += 1;
    if (now - counted > 1000) {
      window.played.fps = 1000 * drawn / (now - counted);
      drawn = 0;
      counted = now;
    }
    if (now - panelAt > 80) {
      panelAt = now;
      showPanel();
    }
  };
  requestAnimationFrame(tick);
}

main().catch((error) => notice(`cannot show the robot: ${error.message}`));
