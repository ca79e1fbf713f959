// The GPUs of the node, one by one, as its worker lists them: what each has, what is taken, and how busy it is.
import type { ReactNode } from "react";
import { gpuActivity, gpuSums } from "../../live/gpus";
import { count } from "../../lib/format";
import type { LiveNode } from "../../live/messages";
import { Meter } from "../../ui/bars";
import { Panel } from "./panel";

export function Gpus({ node }: { node: LiveNode }): ReactNode {
  const gpus = node.gpus;
  if (gpus.length === 0) return null;
  return (
    <Panel title="GPUs" aside={<span className="muted">{gpuSums(gpus)}</span>}>
      <ul className="nd-gpus">
        {gpus.map((gpu) => (
          <li key={gpu.uuid || gpu.index}>
            <h3 title={gpu.uuid}>
              {gpu.index}: <bdi>{gpu.name}</bdi>
            </h3>
            <span className="muted">{gpuActivity(gpu)}</span>
            {(gpu.ecc_errors ?? 0) > 0 && <span className="pill bad">{count(gpu.ecc_errors ?? 0, "uncorrected memory error")}</span>}
            <Meter name={`VRAM of GPU ${gpu.index}`} used={gpu.total_vram - gpu.free_vram} reserved={gpu.reserved_vram} total={gpu.total_vram} />
          </li>
        ))}
      </ul>
    </Panel>
  );
}
