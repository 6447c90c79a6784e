// The live page: what the server tells, shown; and a chat with it.

import { Chat } from "./chat.js";
import { Chart, MemoryBar, formatBytes } from "./charts.js";
import { HeatMap } from "./heat.js";
import { RequestError, eventsOf, request } from "./stream.js";

const AGAIN_MS = 2000; // after the connection was lost
const byId = (id) => document.getElementById(id);

let key = "";
let only = null; // the model's name, where there is one alone
const access = () => ({ key, model: only ?? byId("model").value });

const chat = new Chat(access);
const heat = new HeatMap(byId("heat"), byId("heat-axes"), byId("heat-cell"), byId("heat-summary"));
const memory = new MemoryBar(byId("memory"), byId("memory-legend"), byId("memory-now"), byId("memory-planned"));
const hitRate = new Chart(byId("hit-rate"), "Hit rate", (v) => `${(100 * v).toPrecision(3)} %`, 1);
const speed = new Chart(byId("speed"), "Tokens/s", (v) => v.toFixed(1));
const read = new Chart(byId("read"), "Read", (v) => formatBytes(v));

function setState(kind, text) {
  const state = byId("state");
  if (state.textContent !== text) state.textContent = text;
  state.dataset.is = kind;
}

function showModel(model) {
  if (only === null) byId("model-name").textContent = model.model ? `${model.model} is loaded` : "";
  if (model.model) chat.templates.set(model.model, model.chat);
  memory.setPlan(model.plan ?? null);
  heat.setModules(model.modules ?? []);
}

const RECENT_S = 2; // over which rates are taken
let recent = []; // the last ticks
let firstBytes = null;

function showTick(tick) {
  memory.show(tick.memory);
  heat.update(tick.uses, tick.residents);
  firstBytes ??= tick.expert_read_bytes;
  recent.push(tick);
  while (recent.length > 2 && recent[1].time < tick.time - RECENT_S) recent.shift();
  const before = recent[0];
  if (before !== tick) {
    const hits = tick.expert_hits - before.expert_hits;
    const looked = hits + tick.expert_misses - before.expert_misses;
    hitRate.add(tick.time, looked ? hits / looked : null);
    const made = tick.generated_tokens - before.generated_tokens;
    const seconds = tick.time - before.time;
    speed.add(tick.time, made || tick.running ? made / seconds : null);
  }
  read.add(tick.time, tick.expert_read_bytes - firstBytes);
  if (tick.loading) setState("busy", `loading ${tick.loading}`);
  else if (tick.running) setState("busy", tick.waiting ? `answering, ${tick.waiting} waiting` : "answering");
  else setState("ready", "ready");
  byId("send").disabled = Boolean(tick.loading && only);
}

// The models too, each time: it may be another server that answers now.
async function follow() {
  for (;;) {
    let reason = "connection lost";
    try {
      await showModels();
      const response = await request("events", key);
      recent = [];
      firstBytes = null;
      for await (const [name, data] of eventsOf(response)) {
        if (name === "model") showModel(JSON.parse(data));
        else showTick(JSON.parse(data));
      }
    } catch (error) {
      if (error.status === 401) return askForKey(error.message);
      if (error instanceof RequestError) reason = error.message;
    }
    setState("lost", reason);
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

async function showModels() {
  const { data } = await (await request("v1/models", key)).json();
  const chosen = byId("model").value;
  only = data.length === 1 ? data[0].id : null;
  byId("model-name").textContent = only ?? "";
  byId("model-choice").hidden = only !== null;
  byId("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
}

function begin() {
  byId("key-form").hidden = true;
  byId("message").focus({ preventScroll: true });
  follow();
}

function askForKey(text) {
  setState("lost", "needs a key");
  byId("key-error").textContent = text;
  byId("key-form").hidden = false;
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
  begin();
});

const settings = await (await request("settings", "")).json();
if (settings.needs_key) askForKey("");
else begin();
