/** The prefix tree: what is cached, and how many tokens it has saved. */

import { useState } from "preact/hooks";
import { age, count, counted, share, tenantName } from "../format.ts";
import { moveFocus } from "../shell/focus.ts";
import type { CacheView } from "../types.ts";
import { rowsOf, type Row } from "./tree-rows.ts";

const MAX_ROWS = 40;


export function PrefixTree({ cache }: { cache: CacheView }) {
  const [closed, setClosed] = useState<ReadonlySet<number>>(new Set());
  const { tree } = cache;
  const rows = rowsOf(tree.nodes, closed);
  const most = Math.max(1, ...tree.nodes.map((node) => node.saved_tokens));
  const toggle = (id: number, close: boolean) => {
    const next = new Set(closed);
    if (close) next.add(id);
    else next.delete(id);
    setClosed(next);
  };
  const key = (event: KeyboardEvent, row: Row) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    if (row.kind === "node" && row.numChildren) toggle(row.node.id, event.key === "ArrowLeft");
  };
  return (
    <section class="card" aria-labelledby="tree-title">
      <div class="row spread">
        <h2 id="tree-title">Prefix tree</h2>
        <p class="muted num">
          {counted(tree.num_nodes, "node")}, {counted(tree.num_tokens, "token")}; of all prompt tokens{" "}
          {share(cache.prefix_hit_tokens, cache.prefix_query_tokens)} were found (
          {count(cache.prefix_hit_tokens)} of {count(cache.prefix_query_tokens)})
        </p>
      </div>
      {!rows.length && <p class="muted">Nothing is cached.</p>}
      <ul class="tree" role="tree" aria-labelledby="tree-title" onKeyDown={moveFocus("[role=treeitem]")}>
        {rows.slice(0, MAX_ROWS).map((row, index) => {
          const common = {
            role: "treeitem" as const,
            tabIndex: index === 0 ? 0 : -1,
            "aria-level": row.depth + 1,
            style: { paddingInlineStart: `${Math.min(row.depth, 8) * 0.9 + 0.3}rem` },
          };
          if (row.kind === "unused") {
            return (
              <li key={`unused ${row.parent}`} {...common} class="tree-unused muted num">
                {counted(row.numNodes, "more node")} without a hit, {counted(row.numTokens, "token")}
              </li>
            );
          }
          const { node, numChildren } = row;
          const isClosed = closed.has(node.id);
          return (
            <li
              key={node.id}
              {...common}
              aria-expanded={numChildren ? !isClosed : undefined}
              onKeyDown={(event) => key(event, row)}
              onClick={() => numChildren && toggle(node.id, !isClosed)}
            >
              <span class="tree-name num">
                <span aria-hidden="true">{numChildren ? (isClosed ? "▸" : "▾") : "·"}</span>{" "}
                {counted(node.num_tokens, "token")}
                {node.pinned && <span class="tag">pinned</span>}
              </span>
              <span class="tree-bar" aria-hidden="true">
                <i style={{ width: `${(100 * node.saved_tokens) / most}%` }} />
              </span>
              <span class="num">saved {count(node.saved_tokens)}</span>
              <span class="muted num tree-rest">
                {counted(node.num_hits, "hit")}, {counted(node.num_users, "user")}, {counted(node.num_blocks, "block")}
                {node.tenant && `, tenant ${tenantName(node.tenant)}`}, stored {age(node.age_s)} ago
              </span>
            </li>
          );
        })}
      </ul>
      {(rows.length > MAX_ROWS || tree.num_nodes > tree.nodes.length) && (
        <p class="muted">The nodes that save the most are shown.</p>
      )}
    </section>
  );
}

