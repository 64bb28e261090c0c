// The episode explorer: one recorded episode, scrubbed by step. Everything drawn here comes from the JSON in the page.
(() => {
  const home = document.getElementById("explorer");
  if (!home) return;
  const recordings = JSON.parse(document.getElementById("recordings").textContent);
  const find = (name) => home.querySelector(`[data-part="${name}"]`);
  const slider = find("step"), clock = find("clock"), play = find("play"), speed = find("speed"), choice = find("choice");
  const SVG = "http://www.w3.org/2000/svg";
  let episode = null, step = 0, playing = 0, tracks = [], carry = 0;

  function unpack(array) {
    if (!array) return null;
    const bytes = Uint8Array.from(atob(array.data), (c) => c.charCodeAt(0));
    const values = array.kind === "u1" ? bytes : new Float32Array(bytes.buffer);
    return { values, shape: array.shape, width: array.shape.slice(1).reduce((a, b) => a * b, 1) };
  }

  function open(index) {
    const source = recordings[index];
    if (!source.ready) {
      source.ready = Object.fromEntries(Object.entries(source).map(([key, value]) => [key, value && value.kind ? unpack(value) : value]));
      source.ready.images = source.pictures.map((data) => {
        const image = new Image();
        image.src = `data:image/webp;base64,${data}`;
        return image;
      });
    }
    episode = source.ready;
    slider.max = episode.steps - 1;
    layOut();
    show(Math.min(step, episode.steps - 1));
  }

  const at = (array, row, column = 0) => (array ? array.values[row * array.width + column] : NaN);
  const column = (array, index = 0) => Array.from({ length: array.shape[0] }, (_, row) => at(array, row, index));

  function make(tag, attributes = {}, parent = null) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (parent) parent.append(made);
    return made;
  }

  // One chart over time; lines are {name, values, style, low, high}.
  function track(title, lines, { height = 128, marks = null, legend = lines.length > 1 ? lines : [], zero = false } = {}) {
    const figure = document.createElement("figure");
    figure.className = "chart track";
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    figure.append(caption);
    if (legend.length) figure.append(legendOf(legend));
    find("tracks").append(figure);
    const width = Math.max(260, figure.clientWidth - 30), left = 46, right = width - 8, top = 6, bottom = height - 20;
    const all = lines.flatMap((line) => [...line.values, ...(line.low || []), ...(line.high || [])]).filter(Number.isFinite);
    let low = Math.min(...extent(all, Math.min)), high = Math.max(...extent(all, Math.max));
    if (zero) low = Math.min(0, low);
    if (!(high > low)) { low -= 0.5; high += 0.5; }
    const x = (t) => left + t / Math.max(1, episode.steps - 1) * (right - left);
    const y = (v) => bottom - (v - low) / (high - low) * (bottom - top);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, figure);
    for (const value of ticks(low, high, 3)) {
      make("path", { class: "grid", d: `M${left} ${y(value)}H${right}` }, svg);
      make("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, svg).textContent = short(Number(value.toPrecision(4)));
    }
    for (const t of ticks(0, episode.steps - 1, width > 400 ? 8 : 4)) make("text", { x: x(t), y: height - 5, "text-anchor": "middle" }, svg).textContent = t;
    for (const line of lines) {
      if (line.low) make("path", { class: `band ${line.style}`, d: `${trace(line.high, x, y)}${trace(line.low, x, y, true)}Z` }, svg);
    }
    for (const line of lines) make("path", { class: `line ${line.style}`, d: trace(line.values, x, y) }, svg);
    if (marks) marks.forEach((on, t) => { if (on) make("path", { class: "line c4", d: `M${x(t)} ${bottom - 8}V${bottom}` }, svg); });
    const cursor = make("line", { class: "cursor", y1: top - 2, y2: bottom }, svg);
    const go = (event) => {
      const box = svg.getBoundingClientRect();
      const share = ((event.clientX - box.left) / box.width * width - left) / (right - left);
      pause();
      show(Math.round(Math.max(0, Math.min(1, share)) * (episode.steps - 1)));
    };
    svg.addEventListener("pointerdown", (event) => { svg.setPointerCapture(event.pointerId); go(event); });
    svg.addEventListener("pointermove", (event) => { if (event.buttons) go(event); });
    tracks.push((t) => { cursor.setAttribute("x1", x(t)); cursor.setAttribute("x2", x(t)); });
  }

  // Round numbers between two bounds.
  function ticks(low, high, count) {
    const size = 10 ** Math.floor(Math.log10((high - low) / count));
    const gap = size * [1, 2, 5, 10].find((factor) => (high - low) / (size * factor) <= count);
    return Array.from({ length: Math.floor(high / gap + 1e-9) - Math.ceil(low / gap - 1e-9) + 1 }, (_, n) => (Math.ceil(low / gap - 1e-9) + n) * gap);
  }

  // Math.min(...values) of a long list would overflow the stack.
  const extent = (values, pick) => (values.length ? [values.reduce((a, b) => pick(a, b))] : [0]);

  function trace(values, x, y, back = false) {
    const order = back ? [...values.keys()].reverse() : [...values.keys()];
    let pen = back ? "L" : "M", path = "";
    for (const t of order) {
      if (!Number.isFinite(values[t])) { if (!back) pen = "M"; continue; }
      path += `${pen}${x(t).toFixed(1)} ${y(values[t]).toFixed(1)}`;
      pen = "L";
    }
    return path;
  }

  function legendOf(lines) {
    const legend = document.createElement("div");
    legend.className = "legend";
    for (const line of lines) {
      const item = document.createElement("span"), key = make("svg", { class: "key", viewBox: "0 0 18 8", "aria-hidden": "true" });
      make("path", { class: `line ${line.style}`, d: "M0 4H18" }, key);
      item.append(key, line.name);
      legend.append(item);
    }
    return legend;
  }

  function layOut() {
    tracks = [];
    find("tracks").replaceChildren();
    find("title").textContent = `${episode.title}: ${episode.steps} steps${episode.terminated ? ", ended by the world" : ""}.`;
    find("picture").hidden = !episode.images.length;
    find("no-picture").hidden = Boolean(episode.images.length);
    find("no-picture").textContent = `No pictures: ${episode.noPictures || "none were recorded"}`;
    find("plane-panel").hidden = !episode.path;
    find("fan-note").textContent = episode.proposals ? "" : "This agent makes no plans; only its action is shown.";
    find("fan-legend").hidden = !episode.proposals;
    track("Reward", [{ name: "reward", values: column(episode.rewards), style: "c2" }], { height: 170 });
    layOutPredictions();
    if (episode.effective) track(`Effective plans, of ${episode.plans}`, [{ name: "effective plans", values: column(episode.effective), style: "c3" }], { height: 150, zero: true });
    if (episode.beliefMean) layOutBelief();
    drawPlane();
  }

  function layOutPredictions() {
    const lines = [];
    if (episode.best) {
      const best = column(episode.best), spread = column(episode.spread);
      lines.push({ name: "best plan (band: spread over worlds and members)", values: best, style: "c0", low: best.map((v, t) => v - spread[t]), high: best.map((v, t) => v + spread[t]) });
      lines.push({ name: "mean of plans", values: column(episode.mean), style: "c5" });
    }
    if (episode.value) lines.push({ name: "the prior's critic", values: column(episode.value), style: "c7 dashed" });
    if (episode.toGo && lines.length) lines.push({ name: "what really came (discounted)", values: column(episode.toGo), style: "c1" });
    if (!lines.length) return;
    const fallback = episode.fallback ? column(episode.fallback) : null;
    track("Predicted return", lines, { height: 150, marks: fallback, legend: lines });
  }

  function layOutBelief() {
    const mean = episode.beliefMean, std = episode.beliefStd, size = mean.width;
    const lines = Array.from({ length: size }, (_, index) => ({ name: `m${index + 1}`, values: column(mean, index), style: `c${index % 8} thin` }));
    track(`Belief: mean of its ${size} latent numbers`, lines, { height: 150, legend: [] });
    const rows = Array.from({ length: episode.steps }, (_, t) => std.values.subarray(t * size, (t + 1) * size));
    const width = rows.map((row) => row.reduce((a, b) => a + b, 0) / size);
    episode.width = width;
    track("Belief: width (mean standard deviation; band: least to most)", [{ name: "width", values: width, style: "c3", low: rows.map((row) => Math.min(...row)), high: rows.map((row) => Math.max(...row)) }], { zero: true });
  }

  let plane = null;
  function drawPlane() {
    const svg = find("plane");
    svg.replaceChildren();
    plane = null;
    if (!episode.path) return;
    const width = Math.max(260, svg.clientWidth), height = Math.max(200, svg.clientHeight);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const xs = column(episode.path, 0), ys = column(episode.path, 1);
    const scale = (values, from, to) => {
      const low = Math.min(...extent(values, Math.min)), high = Math.max(...extent(values, Math.max));
      return (v) => from + (v - low) / (high - low || 1) * (to - from);
    };
    const x = scale(xs, 16, width - 16), y = scale(ys, height - 26, 14);
    const points = xs.map((v, t) => [x(v), y(ys[t])]);
    make("path", { class: "trail", d: `M${points.map((p) => p.map((v) => v.toFixed(1)).join(" ")).join("L")}` }, svg);
    make("circle", { class: "first", cx: points[0][0], cy: points[0][1], r: 5 }, svg);
    const recent = make("path", { class: "recent" }, svg), now = make("circle", { class: "now", r: 6 }, svg);
    const [first, second] = episode.shares.map((share) => `${Math.round(100 * share)} %`);
    make("text", { x: width - 6, y: height - 6, "text-anchor": "end" }, svg).textContent = `ring: start · across ${first} of the movement, up ${second}`;
    plane = (t) => {
      const last = points.slice(Math.max(0, t - 40), t + 1);
      recent.setAttribute("d", `M${last.map((p) => p.map((v) => v.toFixed(1)).join(" ")).join("L")}`);
      now.setAttribute("cx", points[t][0]);
      now.setAttribute("cy", points[t][1]);
    };
  }

  // Proposed first actions: one column per component, each dot a plan; heavier plans are larger and darker.
  function drawFan() {
    const canvas = find("fan"), style = getComputedStyle(home), colour = (name) => style.getPropertyValue(name);
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const probe = (name) => { canvas.style.color = `var(${name})`; return getComputedStyle(canvas).color; };
    const [plan, done, own, edge, quiet] = ["--c0", "--c1", "--c7", "--edge", "--quiet"].map(probe);
    canvas.style.color = "";
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const size = episode.low.length, left = 34, top = 10, bottom = height - 24, lane = (width - left - 6) / size;
    const y = (share) => bottom - share * (bottom - top);
    pen.font = "11.5px system-ui, sans-serif";
    pen.fillStyle = quiet;
    pen.strokeStyle = edge;
    const same = episode.low.every((v) => v === episode.low[0]) && episode.high.every((v) => v === episode.high[0]);
    for (const share of [0, 0.5, 1]) {
      pen.beginPath();
      pen.moveTo(left, y(share));
      pen.lineTo(width - 6, y(share));
      pen.stroke();
      pen.textAlign = "right";
      if (same) pen.fillText(short(episode.low[0] + share * (episode.high[0] - episode.low[0])), left - 5, y(share) + 4);
    }
    for (let c = 0; c < size; c++) {
      const begin = left + c * lane, middle = begin + lane / 2;
      pen.textAlign = "center";
      pen.fillStyle = quiet;
      pen.fillText(`a${c + 1}`, middle, height - 7);
      if (episode.proposals) dots(pen, c, middle, lane, y, plan);
      const mark = (value, paint, thick, dash) => {
        pen.strokeStyle = paint;
        pen.lineWidth = thick;
        pen.setLineDash(dash);
        const place = y((value - episode.low[c]) / (episode.high[c] - episode.low[c]));
        pen.beginPath();
        pen.moveTo(middle - lane * 0.42, place);
        pen.lineTo(middle + lane * 0.42, place);
        pen.stroke();
        pen.setLineDash([]);
        pen.lineWidth = 1;
      };
      if (episode.own) mark(at(episode.own, step, c), own, 2, [4, 3]);
      mark(at(episode.actions, step, c), done, 3, []);
    }
  }

  function dots(pen, c, middle, lane, y, paint) {
    const plans = episode.plans, size = episode.low.length;
    pen.fillStyle = paint;
    for (let n = plans - 1; n >= 0; n--) {
      const weight = episode.weights.values[step * plans + n] / 255;
      const share = episode.proposals.values[(step * plans + n) * size + c] / 255;
      const aside = ((n * 0.618034 + 0.5) % 1) - 0.5; // spread evenly, the heaviest in the middle
      pen.globalAlpha = 0.1 + 0.9 * weight;
      pen.beginPath();
      pen.arc(middle + aside * lane * 0.72, y(share), 1.6 + 3.4 * weight, 0, 7);
      pen.fill();
    }
    pen.globalAlpha = 1;
  }

  function show(t) {
    step = t;
    slider.value = t;
    clock.textContent = `step ${t} of ${episode.steps - 1}`;
    tracks.forEach((move) => move(t));
    if (plane) plane(t);
    drawFan();
    let index = -1;
    while (index + 1 < episode.pictureSteps.length && episode.pictureSteps[index + 1] <= t) index++;
    if (index >= 0) {
      const image = find("picture"), shown = episode.images[index].src;
      if (image.getAttribute("src") !== shown) image.setAttribute("src", shown);
      find("picture-note").textContent = episode.pictureSteps[index] === t ? "" : `picture of step ${episode.pictureSteps[index]}`;
    } else find("picture-note").textContent = "";
    tiles(t);
  }

  function tiles(t) {
    episode.sums ??= column(episode.rewards).reduce((sums, r) => [...sums, (sums.at(-1) || 0) + r], []);
    const say = (name, value, there = true) => {
      const tile = find(`tile-${name}`);
      tile.hidden = !there;
      tile.querySelector("b").textContent = typeof value === "string" ? value : short(value);
    };
    say("reward", at(episode.rewards, t));
    say("sum", episode.sums[t]);
    say("best", at(episode.best, t), Boolean(episode.best));
    say("value", at(episode.value, t), Boolean(episode.value));
    say("effective", at(episode.effective, t), Boolean(episode.effective));
    say("weight", `${(100 * at(episode.topWeight, t)).toFixed(1)} %`, Boolean(episode.topWeight));
    say("width", episode.width ? episode.width[t] : NaN, Boolean(episode.beliefStd));
    const fell = at(episode.fallback, t) === 1;
    say("fallback", fell ? "yes" : "no", Boolean(episode.fallback));
    find("tile-fallback").classList.toggle("warn", fell);
  }

  function pause() {
    cancelAnimationFrame(playing);
    playing = 0;
    play.textContent = "Play";
    play.setAttribute("aria-pressed", "false");
  }

  function start() {
    if (step >= episode.steps - 1) show(0);
    play.textContent = "Pause";
    play.setAttribute("aria-pressed", "true");
    let before = performance.now();
    carry = 0;
    const tick = (now) => {
      carry += Math.max(0, now - before) / 1000 * Number(speed.value); // a frame's time may lie before the press
      before = Math.max(now, before);
      const whole = Math.floor(carry);
      carry -= whole;
      if (whole) show(Math.min(step + whole, episode.steps - 1));
      if (step >= episode.steps - 1) pause();
      else playing = requestAnimationFrame(tick);
    };
    playing = requestAnimationFrame(tick);
  }

  slider.addEventListener("input", () => { pause(); show(Number(slider.value)); });
  play.addEventListener("click", () => (playing ? pause() : start()));
  choice.addEventListener("change", () => { pause(); open(Number(choice.value)); });
  let inView = false;
  new IntersectionObserver((seen) => { inView = seen[0].isIntersecting; }).observe(home);
  document.addEventListener("keydown", (event) => {
    const busy = event.target.closest("input, select, textarea, button, summary, .scroll");
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !inView || busy || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    pause();
    show(Math.max(0, Math.min(episode.steps - 1, step + move * (event.shiftKey ? 10 : 1))));
  });
  document.addEventListener("repaint", () => requestAnimationFrame(drawFan));
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    layOut();
    show(step);
  });
  new ResizeObserver(() => { if (episode) drawFan(); }).observe(find("fan"));
  find("pick").hidden = recordings.length < 2;
  open(0);
})();
