// What reports and the service's pages do beyond showing: sort, find, point, draw. No dependencies
// but plotly.js, where a page has charts.
"use strict";

const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const readData = (id) => JSON.parse(document.getElementById(id).textContent);

// Sorting: a header's button sorts by data-value or text; rows without a value go last.
function sortTable(button) {
  const header = button.closest("th");
  const table = header.closest("table");
  const column = [...header.parentNode.children].indexOf(header);
  const numeric = header.classList.contains("num");
  const before = header.getAttribute("aria-sort");
  const descending = before ? before === "ascending" : numeric;
  const keyOf = (row) => {
    const cell = row.children[column];
    return cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.textContent.trim();
  };
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [keyOf(row), row]);
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
  const lacking = (key) => key === "" || key === 1e30;
  rows.sort(([a], [b]) => lacking(a) - lacking(b) || (descending ? compare(b, a) : compare(a, b)));
  const shown = body.querySelectorAll("tr:not(.rest)").length;
  rows.forEach(([, row], index) => {
    row.classList.toggle("rest", index >= shown);
    body.append(row);
  });
  all("th[aria-sort]", table).forEach((other) => other.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
}

function showAll(button) {
  const table = button.closest(".show-all").previousElementSibling.querySelector("table");
  table.classList.add("all");
  const first = table.querySelector("tr.rest");
  button.closest(".show-all").remove();
  if (first) {
    first.tabIndex = -1;
    first.focus();
  }
}

// Finding tensors: every word has to be in the path, the spec or the type.
function findTensors(finder) {
  const field = finder.querySelector("input[type=search]");
  const status = finder.querySelector(".found");
  const leaves = all(".leaf", finder);
  const branches = all(".tree details", finder).map((branch) => [branch, branch.open]);
  const search = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const leaf of leaves) {
      const match = words.every((word) => leaf.dataset.find.includes(word));
      leaf.hidden = !match;
      found += match;
    }
    for (const table of all(".tree table", finder)) {
      table.hidden = !table.querySelector(".leaf:not([hidden])");
    }
    for (const [branch, wasOpen] of branches) {
      branch.hidden = !branch.querySelector(".leaf:not([hidden])");
      branch.open = words.length ? !branch.hidden : wasOpen;
    }
    status.textContent = words.length ? `${found} of ${leaves.length} tensors` : `${leaves.length} tensors`;
  };
  field.addEventListener("input", search);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      field.value = "";
      search();
    }
  });
  for (const button of all("button[data-tree]", finder)) {
    button.addEventListener("click", () => {
      for (const branch of branches) {
        branch[0].open = button.dataset.tree === "open";
        branch[1] = branch[0].open;
      }
    });
  }
}

// Pointing at the torus: the chip under the pointer or the keys, and the group that it is in.
function pointAtTorus(torus) {
  const data = readData(torus.dataset.torus);
  const picture = torus.querySelector(".picture");
  const svg = picture.querySelector("svg");
  const pointed = svg.querySelector(".pointed");
  const readout = torus.querySelector(".readout");
  const help = readout.textContent;
  const size = Object.fromEntries(data.dimensions);
  const columns = size[data.across] || 1;
  const rows = size[data.down] || 1;
  const cores = size.core || 1;
  const width = data.cell / cores;
  const devices = [];
  data.panels.forEach(([slice, plane, left, top], panel) => {
    for (let down = 0; down < rows; down++) {
      for (let across = 0; across < columns; across++) {
        for (let core = 0; core < cores; core++) {
          const place = { slice, core, [data.planes]: plane, [data.across]: across, [data.down]: down };
          for (const [name] of data.dimensions) place[name] ??= 0;
          devices.push({
            place, panel, across, down, core,
            x: left + across * data.pitch + core * width, y: top + down * data.pitch,
            mesh: data.axes.map((axis) =>
              axis.segments.reduce((index, [name, parts, stride]) => index * parts + (Math.floor(place[name] / stride) % parts), 0)),
          });
        }
      }
    }
  });
  const at = (panel, across, down, core) =>
    devices[((panel * rows + down) * columns + across) * cores + core];
  const square = (d) => `M${d.x} ${d.y}h${width}v${data.cell}h${-width}z`;
  const path = (d, className, thickness) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "path");
    made.setAttribute("d", d);
    made.setAttribute("class", className);
    made.setAttribute("stroke-width", thickness);
    return made;
  };
  const shownAxis = () => data.shown[Number(torus.querySelector("input:checked")?.value ?? 0)];
  const name = (d) => `(${data.dimensions.map(([dimension]) => d.place[dimension]).join(",")})`;
  let current = null;
  const show = (device) => {
    current = device;
    torus.classList.toggle("pointing", device !== null);
    if (device === null) {
      pointed.replaceChildren();
      readout.textContent = help;
      return;
    }
    const axis = data.axes.findIndex((one) => one.name === shownAxis());
    const group = devices.filter((d) => d.mesh.every((index, number) => number === axis || index === device.mesh[number]));
    group.sort((a, b) => a.mesh[axis] - b.mesh[axis]);
    const thick = Math.max(1.2, data.cell / 12);
    pointed.replaceChildren(
      path(group.map(square).join(""), "group", thick), path(square(device), "chip", thick * 1.8));
    const where = data.axes.map((one, number) => `${one.name}=${device.mesh[number]}`).join(", ");
    const listed = group.slice(0, 16).map(name).join(" ") + (group.length > 16 ? ` … ${group.length} in all` : "");
    readout.textContent = `Device ${name(device)} is ${where}. Its group on ${shownAxis()}: ${listed}`;
  };
  const under = (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    return devices.find((d) => point.x >= d.x && point.x < d.x + width && point.y >= d.y && point.y < d.y + data.cell);
  };
  svg.addEventListener("pointermove", (event) => {
    const device = under(event);
    if (device && device !== current) show(device);
  });
  svg.addEventListener("pointerdown", (event) => show(under(event) ?? null));
  picture.addEventListener("pointerleave", () => document.activeElement !== picture && show(null));
  picture.addEventListener("blur", () => show(null));
  picture.addEventListener("keydown", (event) => {
    const d = current ?? at(0, 0, 0, 0);
    const wrap = (index, count) => (index + count) % count;
    const steps = cores > 1 ? { across: d.across * cores + d.core, count: columns * cores } : { across: d.across, count: columns };
    const sideways = (by) => {
      const to = wrap(steps.across + by, steps.count);
      return at(d.panel, Math.floor(to / cores), d.down, to % cores);
    };
    const moves = {
      ArrowLeft: () => sideways(-1),
      ArrowRight: () => sideways(1),
      ArrowUp: () => at(d.panel, d.across, wrap(d.down - 1, rows), d.core),
      ArrowDown: () => at(d.panel, d.across, wrap(d.down + 1, rows), d.core),
      PageUp: () => at(wrap(d.panel - 1, data.panels.length), d.across, d.down, d.core),
      PageDown: () => at(wrap(d.panel + 1, data.panels.length), d.across, d.down, d.core),
      Escape: () => null,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(current || event.key === "Escape" ? moves[event.key]() : d);
  });
  all("input", torus).forEach((input) => input.addEventListener("change", () => show(current)));
}

// Charts: figures are in the light palette; what is named after a colour of the page takes it.
function inScheme(figure, colourOf) {
  const paint = (target, key, name) => {
    const colour = name && colourOf(name);
    if (colour && target) target[key] = colour;
  };
  for (const trace of figure.data) {
    for (const part of [trace.line, trace.marker]) paint(part, "color", trace.meta);
    if (trace.fillcolor) paint(trace, "fillcolor", trace.meta);
    paint(trace.fillpattern, "fgcolor", "paper");
  }
  const { layout } = figure;
  paint(layout.font, "color", "ink");
  layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
  layout.hoverlabel = { ...layout.hoverlabel, bgcolor: colourOf("raised"), bordercolor: colourOf("rule"), font: { color: colourOf("ink") } };
  for (const [key, value] of Object.entries(layout)) {
    if (/^[xy]axis/.test(key)) {
      value.gridcolor = value.linecolor = colourOf("rule");
    }
  }
  for (const shape of layout.shapes ?? []) {
    paint(shape.line, "color", shape.name);
    if (shape.fillcolor) paint(shape, "fillcolor", shape.name);
  }
  for (const note of layout.annotations ?? []) {
    if (note.arrowcolor) paint(note, "arrowcolor", "ink");
    if (note.bgcolor) paint(note, "bgcolor", "paper");
  }
  return figure;
}

function drawChart(place) {
  const style = getComputedStyle(document.documentElement);
  const colourOf = (name) => style.getPropertyValue(`--${name}`).trim();
  const { data, layout } = inScheme(readData(place.dataset.figure), colourOf);
  if (matchMedia("(max-width: 40rem)").matches) {
    layout.margin = { ...layout.margin, l: 48, r: 8 };
    if (layout.meta?.keyed) layout.showlegend = false;
    layout.xaxis.title.text = layout.xaxis.title.text.split(",")[0];
  }
  place.classList.add("drawn");
  window.Plotly.react(place, data, layout, { responsive: true, displaylogo: false, displayModeBar: false });
}

// A table wider than the screen scrolls by keys too.
function reachTable(scroll) {
  if (scroll.scrollWidth <= scroll.clientWidth) return;
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", scroll.querySelector("caption")?.textContent.trim() ?? "Table");
}

function start() {
  document.documentElement.classList.add("scripted");
  all(".scroll").forEach(reachTable);
  all("th button").forEach((button) => button.addEventListener("click", () => sortTable(button)));
  all("[data-show-all]").forEach((button) => button.addEventListener("click", () => showAll(button)));
  all("[data-finder]").forEach(findTensors);
  all("[data-torus]").forEach(pointAtTorus);
  if (!window.Plotly) return;
  const charts = all("[data-figure]");
  charts.forEach(drawChart);
  const redraw = () => charts.forEach(drawChart);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  matchMedia("(max-width: 40rem)").addEventListener("change", redraw);
  matchMedia("print").addEventListener("change", redraw);
}

start();
