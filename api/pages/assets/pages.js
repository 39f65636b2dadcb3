// Live parts of the service's pages: a plan's progress by server-sent events, lists by asking again.
"use strict";

const byId = (id) => document.getElementById(id);

function seconds(value) {
  const [scale, unit] = value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  const scaled = value / scale;
  return `${scaled.toFixed(scaled >= 10 ? 1 : 2)} ${unit}`;
}

function followPlan(section) {
  const source = new EventSource(section.dataset.events);
  const stages = JSON.parse(section.dataset.stages);
  let announced = "";
  const announce = (text) => {
    if (text !== announced) byId("progress-told").textContent = announced = text;
  };
  const clock = byId("progress-time");
  const since = Date.parse(clock.dataset.since);
  const tick = () => (clock.textContent = `${Math.max(0, Math.round((Date.now() - since) / 1000))} s`);
  tick();
  setInterval(tick, 1000);
  source.addEventListener("progress", (event) => {
    const told = JSON.parse(event.data);
    const status = document.querySelector("h1 + .lead [data-status]");
    status.className = "status status-running";
    status.textContent = "◐ running";
    const stage = stages[told.stage] ?? told.stage ?? "working";
    byId("progress-stage").textContent = stage;
    const bar = byId("progress-bar");
    if (told.meshes) {
      bar.max = told.meshes;
      bar.value = told.meshes_tried ?? 0;
      byId("progress-meshes").textContent = `${told.meshes_tried ?? 0} of ${told.meshes}`;
    }
    if (typeof told.best_step_s === "number") byId("progress-best").textContent = seconds(told.best_step_s);
    if (typeof told.gap === "number") byId("progress-gap").textContent = `${(100 * told.gap).toPrecision(2)} %`;
    byId("progress-message").textContent = told.message ?? "";
    announce(typeof told.best_step_s === "number" ? `${stage}, best step time ${seconds(told.best_step_s)}` : stage);
  });
  source.addEventListener("done", () => {
    source.close();
    location.reload();
  });
}

// Lists ask for themselves again and take over their live parts until nothing is under way.
function refreshPage(main) {
  const wait = Number(main.dataset.refresh);
  const again = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetch(location.href, { headers: { accept: "text/html" } });
        if (answer.ok && !answer.redirected) {
          const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
          const freshMain = fresh.querySelector("main");
          if (!freshMain.dataset.refresh && fresh.querySelector("[data-figure]")) return location.reload();
          for (const part of document.querySelectorAll("main [id^=live-]")) {
            const other = fresh.getElementById(part.id);
            const busy = part.contains(document.activeElement);
            if (other && !busy && other.innerHTML !== part.innerHTML) part.innerHTML = other.innerHTML;
          }
          if (!freshMain.dataset.refresh) return undefined;
        }
      } catch {
        // The server is away for a moment; the next round asks again.
      }
    }
    return setTimeout(again, wait);
  };
  setTimeout(again, wait);
}

function showPresets(select) {
  const show = () => {
    const { dataset } = select.selectedOptions[0];
    for (const name of ["batch", "sequence", "layers"]) byId(name).placeholder = dataset[name];
  };
  select.addEventListener("change", show);
  show();
}

document.querySelectorAll("[data-events]").forEach(followPlan);
document.querySelectorAll("main[data-refresh]").forEach(refreshPage);
document.querySelectorAll("[data-presets]").forEach(showPresets);
byId("form-error")?.focus();
