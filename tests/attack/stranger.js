// A stranger with another language: Node's own gRPC client and the .proto files, nothing of ours. Sends hostile requests for
// some seconds; prints how each was answered, as JSON. Arguments: address, folder of the .proto files, run id in hex, seconds.
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const crypto = require('crypto');

const [address, protos, run, seconds] = process.argv.slice(2);
const definition = loader.loadSync('protos/v1/coordinator.proto', { includeDirs: [protos], keepCase: true, longs: String });
const api = grpc.loadPackageDefinition(definition).swarmentum.v1;
// A stranger does not know the pinned certificate, and does not care.
const insecure = grpc.credentials.createSsl(null, null, null, {
  checkServerIdentity: () => undefined, rejectUnauthorized: false,
});
const options = { 'grpc.ssl_target_name_override': 'swarmentum-coordinator' };
const peers = new api.CoordinatorService(address, insecure, options);
const operator = new api.OperatorService(address, insecure, options);
const runId = Buffer.from(run, 'hex');
const random = (n) => crypto.randomBytes(n);
const envelope = (kind, body) => ({ kind, run_id: runId, public_key: random(32), body, signature: random(64) });

const hostile = [
  ['Join', () => peers.Join.bind(peers), () => ({ envelope: envelope(4, random(200)) })],
  ['Join empty', () => peers.Join.bind(peers), () => ({})],
  ['MayJoin', () => peers.MayJoin.bind(peers), () => ({ envelope: envelope(4, random(50)) })],
  ['Report', () => peers.Report.bind(peers), () => ({ envelope: envelope(6, random(1000)) })],
  ['Report 1 MB', () => peers.Report.bind(peers), () => ({ envelope: envelope(6, random(1 << 20)) })],
  ['GetRun of nothing', () => peers.GetRun.bind(peers), () => ({ run_id: random(32) })],
  ['ListEntries far', () => peers.ListEntries.bind(peers), () => ({ run_id: runId, from_step: '18446744073709551615' })],
  ['CreateRun', () => operator.CreateRun.bind(operator), () => ({ envelope: envelope(8, random(100)) })],
  ['CreateTicket', () => operator.CreateTicket.bind(operator), () => ({ envelope: envelope(8, random(100)) })],
  ['ExcludePeer', () => operator.ExcludePeer.bind(operator), () => ({ envelope: envelope(8, random(100)) })],
  ['WithdrawSnapshot', () => operator.WithdrawSnapshot.bind(operator), () => ({ envelope: envelope(8, random(100)) })],
];

const answers = {};
function ask([name, method, make]) {
  return new Promise((done) => {
    method()(make(), { deadline: Date.now() + 5000 }, (error) => {
      const key = `${name}: ${error ? grpc.status[error.code] : 'OK'}`;
      answers[key] = (answers[key] || 0) + 1;
      done();
    });
  });
}

(async () => {
  const until = Date.now() + 1000 * Number(seconds);
  do {
    await Promise.all(hostile.map(ask));
  } while (Date.now() < until);
  console.log(JSON.stringify(answers));
  process.exit(0);
})();
