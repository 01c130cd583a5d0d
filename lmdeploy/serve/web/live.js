// The state of the server as a table; the place of the live views.

import { get } from "./api.js";
import { element } from "./talk.js";

export async function show(table, health, models, key) {
  const { version } = await get("/version", key);
  const facts = [["Version", version], ["State", health.status]];
  if (health.nodes) facts.push(["Servers", Object.entries(health.nodes).map((pair) => pair.join(": ")).join(", ")]);
  for (const card of models) {
    facts.push(["Model", card.max_model_len ? `${card.id} (context ${card.max_model_len} tokens)` : card.id]);
  }
  table.replaceChildren(...facts.map(([name, value]) => {
    const row = element("tr");
    row.append(element("th", "", name), element("td", "", String(value)));
    return row;
  }));
}
