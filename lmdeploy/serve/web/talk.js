// How a conversation is shown. All text of models and people goes in as text, never as HTML.

export function element(tag, className = "", text = "") {
  const found = document.createElement(tag);
  if (className) found.className = className;
  if (text) found.textContent = text;
  return found;
}

// One message on the page.
export class Shown {
  constructor(into, role) {
    this.root = element("article", `message ${role}`);
    this.root.append(element("div", "who", role === "user" ? "You" : "Assistant"));
    this.body = element("div", "text");
    this.root.append(this.body);
    into.append(this.root);
  }

  reasoning(text) {
    if (!this.thoughts) {
      const details = element("details", "reasoning");
      details.open = true;
      this.thoughts = element("div");
      details.append(element("summary", "", "Reasoning"), this.thoughts);
      this.body.before(details);
    }
    this.thoughts.textContent = text;
  }

  // Fenced blocks as code, the rest as it is.
  text(text) {
    const parts = text.split(/^```[^\n]*\n?/m);
    this.body.replaceChildren(...parts.map((part, i) => (i % 2 ? element("pre", "", part) : part)));
  }

  tools(calls) {
    const shown = calls.map((call) => element("pre", "tool", `${call.name}(${call.arguments})`));
    for (const old of this.root.querySelectorAll("pre.tool")) old.remove();
    this.body.after(...shown);
  }

  error(text) {
    const shown = element("div", "error", text);
    shown.setAttribute("role", "alert");
    this.root.append(shown);
  }
}

// Follows the end while the reader is there, and leaves the reader alone otherwise.
export function following(scroller, change) {
  const near = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
  change();
  if (near) scroller.scrollTop = scroller.scrollHeight;
}
