// The conversation. What a model says is only ever put in as text.

import { RequestError, eventsOf, request } from "./stream.js";

function turn(log, kind) {
  const root = document.createElement("div");
  root.className = `turn ${kind}`;
  const text = document.createElement("div");
  text.className = "text";
  root.append(text);
  log.append(root);
  return { root, text };
}

function line(root, kind, text) {
  const made = document.createElement("p");
  made.className = kind;
  made.textContent = text;
  root.append(made);
}

export class Chat {
  // `access` gives the key and the model in use, `templates` which models are known to have none.
  constructor(access) {
    this.access = access;
    this.templates = new Map();
    this.messages = [];
    this.abort = null;
    this.log = document.getElementById("log");
    this.form = document.getElementById("ask");
    this.input = document.getElementById("message");
    this.send = document.getElementById("send");
    this.stop = document.getElementById("stop");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
    this.stop.addEventListener("click", () => this.abort?.abort());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing) this.abort?.abort();
    });
    document.getElementById("clear").addEventListener("click", () => this.clear());
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    this.log.replaceChildren();
    this.input.focus();
  }

  async ask() {
    const content = this.input.value.trim();
    if (!content || this.abort) return;
    document.getElementById("empty")?.remove();
    this.input.value = "";
    const question = turn(this.log, "user");
    question.text.textContent = content;
    const before = this.messages;
    const messages = [...before, { role: "user", content }];
    this.messages = messages;
    const answer = turn(this.log, "assistant");
    answer.said = answer.text.appendChild(document.createTextNode(""));
    answer.text.classList.add("waits");
    this.scroll(true);
    this.setBusy(new AbortController());
    let isKept = true;
    try {
      await this.stream(messages, answer);
    } catch (error) {
      const isStopped = error.name === "AbortError";
      // As far as a stopped answer came it is one; a failed one is none.
      isKept = isStopped && answer.said.data !== "";
      if (isStopped) line(answer.root, "about", "stopped");
      else line(answer.root, "error", error.message);
    } finally {
      answer.text.classList.remove("waits");
      if (!isKept) {
        question.root.classList.add("dropped");
        answer.root.classList.add("dropped");
        line(answer.root, "about", "Not part of the conversation.");
      }
      if (this.messages === messages) {
        this.messages = isKept ? [...messages, { role: "assistant", content: answer.said.data }] : before;
      }
      this.setBusy(null);
      this.scroll(false);
    }
  }

  // The button that was pressed is hidden: the keyboard goes on in the message.
  setBusy(abort) {
    const isPressed = [this.send, this.stop].includes(document.activeElement);
    this.abort = abort;
    this.send.hidden = abort !== null;
    this.stop.hidden = abort === null;
    this.log.setAttribute("aria-busy", String(abort !== null));
    if (isPressed) this.input.focus();
  }

  // Asks, and shows what comes.
  async stream(messages, answer) {
    const { key, model } = this.access();
    const started = performance.now();
    let response;
    if (this.templates.get(model) !== false) {
      try {
        response = await this.post("v1/chat/completions", key, { model, messages });
      } catch (error) {
        if (!(error instanceof RequestError) || error.code !== "no_chat_template") throw error;
        this.templates.set(model, false);
      }
    }
    if (!response) {
      line(answer.root, "about", "This model has no chat template: it goes on with your text.");
      const prompt = messages.at(-1).content;
      response = await this.post("v1/completions", key, { model, prompt, max_tokens: 256 });
    }
    const text = answer.said;
    let thought = null;
    let usage = null;
    let reason = null;
    let firstAt = null;
    for await (const [, data] of eventsOf(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new RequestError(500, chunk.error);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const delta = choice.delta ?? { content: choice.text };
      if (delta.reasoning_content) {
        thought ??= this.openThought(answer);
        thought.appendData(delta.reasoning_content);
      }
      for (const call of delta.tool_calls ?? []) {
        text.appendData(`${call.function.name}(${call.function.arguments})`);
      }
      if (delta.content) text.appendData(delta.content);
      if (delta.content || delta.reasoning_content) firstAt ??= performance.now();
      this.scroll(false);
    }
    this.tellUsage(answer, usage, reason, started, firstAt);
  }

  post(path, key, body) {
    return request(path, key, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal: this.abort.signal,
    });
  }

  openThought(answer) {
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = "Thinking";
    const text = document.createElement("div");
    text.className = "text";
    details.append(summary, text);
    answer.root.prepend(details);
    return text.appendChild(document.createTextNode(""));
  }

  tellUsage(answer, usage, reason, started, firstAt) {
    if (!usage || firstAt === null) return;
    const now = performance.now();
    const n = usage.completion_tokens;
    const parts = [`${n} tokens`];
    if (n > 1 && now > firstAt) parts.push(`${((1000 * (n - 1)) / (now - firstAt)).toFixed(1)} tokens/s`);
    parts.push(`first after ${((firstAt - started) / 1000).toFixed(1)} s`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${usage.prompt_tokens}${cached ? ` (${cached} kept)` : ""}`);
    if (reason === "length") parts.push("cut at the limit");
    line(answer.root, "about", parts.join(" · "));
  }

  // Follows the text, unless the reader has scrolled up.
  scroll(always) {
    const { log } = this;
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
  }
}
