/**
 * The rows of the prefix tree. A node has its own row if it, or a node below it, has saved tokens or is pinned. All
 * other children of a parent share one row.
 */

import type { TreeNode } from "../types.ts";

export interface NodeRow {
  kind: "node";
  node: TreeNode;
  depth: number;
  numChildren: number;
}

export interface UnusedRow {
  kind: "unused";
  parent: number | null;
  depth: number;
  numNodes: number;
  numTokens: number;
}

export type Row = NodeRow | UnusedRow;

/** In the order of the tree, children by what they save. `closed`: nodes with hidden children. */
export function rowsOf(nodes: TreeNode[], closed: ReadonlySet<number>): Row[] {
  const known = new Set(nodes.map((node) => node.id));
  const children = new Map<number | null, TreeNode[]>();
  for (const node of nodes) {
    const parent = node.parent !== null && known.has(node.parent) ? node.parent : null;
    const siblings = children.get(parent);
    if (siblings) siblings.push(node);
    else children.set(parent, [node]);
  }
  const below = (id: number): TreeNode[] => children.get(id) ?? [];
  const tokens = (node: TreeNode): number => below(node.id).reduce((sum, one) => sum + tokens(one), node.num_tokens);
  const counts = (node: TreeNode): number => below(node.id).reduce((sum, one) => sum + counts(one), 1);
  const shows = (node: TreeNode): boolean => node.saved_tokens > 0 || node.pinned || below(node.id).some(shows);
  const rows: Row[] = [];
  const add = (parent: number | null, depth: number) => {
    const all = children.get(parent) ?? [];
    const shown = all.filter(shows).sort((a, b) => b.saved_tokens - a.saved_tokens);
    const rest = all.filter((node) => !shows(node));
    for (const node of shown) {
      rows.push({ kind: "node", node, depth, numChildren: below(node.id).length });
      if (!closed.has(node.id)) add(node.id, depth + 1);
    }
    if (!rest.length) return;
    const numNodes = rest.reduce((sum, node) => sum + counts(node), 0);
    const numTokens = rest.reduce((sum, node) => sum + tokens(node), 0);
    rows.push({ kind: "unused", parent, depth, numNodes, numTokens });
  };
  add(null, 0);
  return rows;
}
