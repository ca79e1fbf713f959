// The rows of models, from the definitions, the feed, the rules and the rates.
import { useMemo, useState } from "react";
import { isLoaded, useThrottledNodes } from "../backends/throttled-nodes";
import { useLive } from "../live/hooks";
import { useRules, type Rule } from "../scheduling/rules";
import { useDefinitionList, useRates } from "./definitions";
import { modelRows, type ModelRow } from "./rows";
import type { DefinitionRow } from "./shapes";

const NO_ROWS: readonly DefinitionRow[] = [];
const NO_RULES: readonly Rule[] = [];

/** Every model; `isKnown` once the feed has sent the nodes. */
export function useModelRows(): { rows: readonly ModelRow[]; isKnown: boolean } {
  const { data } = useDefinitionList();
  const rules = useRules();
  const rates = useRates();
  const nodes = useThrottledNodes();
  const operations = useLive((state) => state.operations);
  const facts = useMemo(() => ({ definitions: data?.rows ?? NO_ROWS, nodes: nodes.values(), operations: operations.values(), rules: rules.data ?? NO_RULES, rates }), [data, nodes, operations, rules.data, rates]);
  const [shown, setShown] = useState<{ facts: typeof facts | null; rows: readonly ModelRow[] }>({ facts: null, rows: [] });
  if (shown.facts === facts) return { rows: shown.rows, isKnown: isLoaded(nodes) };
  const rows = modelRows(facts, shown.rows);
  setShown({ facts, rows });
  return { rows, isKnown: isLoaded(nodes) };
}
